"""Sharded policies: loading, rollouts of unequal length, guidance on one rank, resuming and exporting."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
import yaml
from lightning.pytorch.callbacks import ModelCheckpoint
from torch import Tensor
from transformers import AutoModelForCausalLM, AutoTokenizer

from lit_madrl.export import export_checkpoint, policy_weights
from lit_madrl.policy import PolicyConfig
from lit_madrl.prepare import write_tiny_choice
from lit_madrl.rollouts.policy_weights import fingerprint
from lit_madrl.strategies import FullySharded
from tests.helpers.learning import assert_same
from tests.helpers.processes import process_group_of_its_own, run_ranks
from tests.helpers.tiny_models import tiny_model
from tests.learners.sharded import LORA, PROBLEMS, continued, resumed, supervised, trained_adapters

KINDS = ["whole", "shares"]
Results = dict[str, Any]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A model of two layers with tied embeddings; its vocabulary cannot be divided evenly."""
    folder = tmp_path_factory.mktemp("models") / "two_layers"
    write_tiny_choice(folder, hidden_size=32, layers=2, vocab_size=513)
    return folder


@pytest.fixture(scope="module")
def output(folder: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Where all checkpoints are: first those of one rank, on which the two ranks go on."""
    output = tmp_path_factory.mktemp("ranks")
    with process_group_of_its_own():
        alone = {kind: resumed(folder, output, kind == "shares", 1) for kind in KINDS}
    saver = ModelCheckpoint(
        output / "adapters of one device", filename="{step}", every_n_train_steps=2, save_top_k=-1
    )
    alone["adapters"] = trained_adapters(folder, "auto", 1, 4, saver=saver)
    torch.save(alone, output / "alone.pt")
    run_ranks("tests.learners.sharded", folder, output)
    return output


@pytest.fixture(scope="module")
def ranks(output: Path) -> tuple[Results, Results]:
    first, second = (torch.load(output / f"rank{rank}.pt", weights_only=False) for rank in range(2))
    return first, second


@pytest.fixture(scope="module")
def on_one_device(folder: Path) -> Results:
    """Four steps as they are without any of this."""
    return supervised(folder, "auto", ranks=1, steps=4)


def assert_equal(got: dict[str, Tensor], expected: dict[str, Tensor]) -> None:
    assert got.keys() == expected.keys()
    assert [name for name, tensor in expected.items() if not torch.equal(got[name], tensor)] == []


def assert_same_numbers(
    got: list[dict[str, float]], expected: list[dict[str, float]], rel: float = 1e-4
) -> None:
    for values, wanted in zip(got, expected, strict=True):
        assert values == pytest.approx(wanted, rel=rel, abs=1e-5, nan_ok=True)


# Rollouts


@pytest.mark.parametrize("how", ["gathered", "layer by layer"])
@pytest.mark.parametrize("what", ["guided", "uneven"])
def test_rollouts_are_those_of_ddp(what: str, how: str, ranks: tuple[Results, Results]) -> None:
    for results in ranks:
        got, expected = results[f"{what}, {how}"], results[f"{what}, ddp"]
        assert got["completions"] == expected["completions"]
        assert_same(got["weights"], expected["weights"], atol=1e-5)
        assert_same_numbers(got["logged"], expected["logged"])
        if what == "guided":
            for name, state in expected["selector"].items():
                torch.testing.assert_close(got["selector"][name], state, rtol=0, atol=1e-6)
        else:
            assert got["validation"] == pytest.approx(expected["validation"], rel=1e-3, abs=1e-5, nan_ok=True)


def test_the_scenarios_are_what_they_say(ranks: tuple[Results, Results]) -> None:
    short, long = (max(results["uneven, gathered"]["lengths"][0]) for results in ranks)
    assert short <= 10
    assert long > 100
    last = ranks[0]["guided, gathered"]["logged"][-1]
    assert last["train/guidance/all_failed"] == 0.5
    assert last["train/guidance/source_guided"] > 0
    assert ranks[0]["guided, gathered"]["selector"]["0.selector.phi"].any()
    assert all(step["train/grad_norm"] > 0 for step in ranks[0]["uneven, gathered"]["logged"])


# Loading


def test_one_rank_reads_and_all_have_their_share(folder: Path, ranks: tuple[Results, Results]) -> None:
    policy = PolicyConfig(str(folder)).build()
    first, second = (results["loaded"] for results in ranks)
    assert_equal(first["weights"], policy.state_dict())
    assert second["weights"] == {}
    numbers = sum(p.numel() for p in policy.parameters())
    assert first["held"] + second["held"] == numbers
    assert first["held"] == pytest.approx(numbers / 2, rel=0.01)
    for results in (first, second):
        assert_equal(results["buffers"], dict(policy.named_buffers()))


@pytest.mark.parametrize("lora", [None, LORA], ids=["all weights", "adapters"])
@pytest.mark.parametrize("family", ["qwen3", "qwen3-tied", "llama", "gemma2", "gpt2-tied"])
def test_a_skeleton_has_all_but_values(family: str, lora: Any, tmp_path: Path) -> None:
    if lora and family.startswith("gpt2"):
        lora = {"r": 2, "target_modules": ["c_attn"], "fan_in_fan_out": True}
    tiny_model(family).save_pretrained(tmp_path)
    config = PolicyConfig(str(tmp_path), lora=lora)
    skeleton, built = config.skeleton(), config.build()
    assert all(p.is_meta for p in skeleton.parameters())

    def shapes(tensors: dict[str, Tensor]) -> dict[str, tuple[Any, ...]]:
        return {name: (t.shape, t.dtype, t.requires_grad) for name, t in tensors.items()}

    assert shapes(dict(skeleton.named_parameters())) == shapes(
        dict(built.named_parameters())
    )  # tied ones once
    assert skeleton.state_dict().keys() == built.state_dict().keys()
    assert_equal(dict(skeleton.named_buffers()), dict(built.named_buffers()))
    assert (skeleton.packed, skeleton.training) == (built.packed, built.training)


def test_gathered_weights_can_be_handed_over(folder: Path, ranks: tuple[Results, Results]) -> None:
    """To another engine, on every rank, without being put back into shares."""
    model = PolicyConfig(str(folder)).build().model
    for results in (rank["loaded"] for rank in ranks):
        assert_equal(results["sent"], model.state_dict())
        assert torch.equal(results["fingerprint"], fingerprint(model))
        assert results["shares while gathered"] == []


# Training


@pytest.mark.parametrize("variant", ["offloaded", "activations made again"])
def test_saving_memory_changes_nothing(variant: str, ranks: tuple[Results, Results]) -> None:
    for results in ranks:
        expected = results["resumed, False"]["straight"]
        assert_same_numbers(results[variant]["logged"][:1], expected["logged"][:1])


def test_mixed_precision_keeps_float32_weights(ranks: tuple[Results, Results]) -> None:
    exact = ranks[0]["offloaded"]
    for name, dtype in (("bf16-mixed", torch.float32), ("bf16", torch.bfloat16)):
        got = ranks[0][name]
        assert {weight.dtype for weight in got["weights"].values()} == {dtype}
        assert_same_numbers(got["logged"], exact["logged"], rel=2e-2)
        assert got["logged"] != exact["logged"]
    # The computation is in bfloat16, the steps are not: they are smaller than its resolution.
    moved = ranks[0]["bf16-mixed"]["weights"]["model.norm.weight"]
    assert (moved != moved.bfloat16().float()).any()


# Resuming


@pytest.mark.parametrize("distributed", [False, True])
def test_resuming_is_exact(distributed: bool, ranks: tuple[Results, Results], on_one_device: Results) -> None:
    for results in ranks:
        straight, again = (results[f"resumed, {distributed}"][name] for name in ("straight", "resumed"))
        assert_equal(again["weights"], straight["weights"])
        assert again["logged"] == straight["logged"][2:]
        assert again["cursor"] == straight["cursor"] == 16
        assert_same(straight["weights"], on_one_device["weights"], atol=1e-5)
        assert_same_numbers(straight["logged"], on_one_device["logged"])


@pytest.mark.parametrize("kind", KINDS)
def test_two_ranks_go_on_for_one(kind: str, ranks: tuple[Results, Results], on_one_device: Results) -> None:
    for results in ranks:
        assert_same(results[f"{kind} of 1"]["weights"], on_one_device["weights"], atol=1e-5)
        assert_same_numbers(results[f"{kind} of 1"]["logged"], on_one_device["logged"][2:])
        assert results[f"{kind} of 1"]["cursor"] == on_one_device["cursor"]


@pytest.mark.parametrize("kind", KINDS)
def test_one_rank_goes_on_for_two(kind: str, folder: Path, output: Path, on_one_device: Results) -> None:
    checkpoint = output / f"{kind} of 2" / "step=2.ckpt"
    with process_group_of_its_own():
        results = [continued(folder, checkpoint, 1)]
    if kind == "whole":
        results.append(supervised(folder, "auto", ranks=1, steps=4, ckpt_path=checkpoint))
    for result in results:
        assert_same(result["weights"], on_one_device["weights"], atol=1e-5)
        assert_same_numbers(result["logged"], on_one_device["logged"][2:])
        assert result["cursor"] == on_one_device["cursor"]


def test_one_rank_alone_resumes_exactly(output: Path) -> None:
    alone = torch.load(output / "alone.pt", weights_only=False)
    for kind in KINDS:
        runs = alone[kind]
        assert_equal(runs["resumed"]["weights"], runs["straight"]["weights"])
        assert (output / f"{kind} of 1" / "step=2.ckpt").is_dir() == (kind == "shares")


def test_two_ranks_go_on_with_the_adapters_of_one_device(
    output: Path, ranks: tuple[Results, Results]
) -> None:
    """Whose optimizer numbers the parameters that it trains, and no others."""
    expected = torch.load(output / "alone.pt", weights_only=False)["adapters"]
    for results in ranks:
        assert_same(results["adapters of one device"]["weights"], expected["weights"], atol=1e-5)
        assert_same_numbers(results["adapters of one device"]["logged"], expected["logged"][2:])


# Exporting


def config_of(folder: Path, path: Path, **policy: Any) -> Path:
    policy = {"pretrained": str(folder), **policy}
    path.write_text(yaml.safe_dump({"model": {"class_path": "SFTLearner", "init_args": {"policy": policy}}}))
    return path


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("count", [1, 2])
def test_export(
    kind: str, count: int, folder: Path, output: Path, ranks: tuple[Results, Results], tmp_path: Path
) -> None:
    config = config_of(folder, tmp_path / "config.yaml")
    export_checkpoint(output / f"{kind} of {count}" / "step=4.ckpt", tmp_path / "model", config)
    model = AutoModelForCausalLM.from_pretrained(tmp_path / "model")
    if count == 1:
        trained = torch.load(output / "alone.pt", weights_only=False)[kind]["straight"]["weights"]
    else:
        trained = ranks[0][f"resumed, {kind == 'shares'}"]["straight"]["weights"]
    assert_equal(dict(model.named_parameters()), trained)
    prompt = PROBLEMS[0].prompt
    tokens = [AutoTokenizer.from_pretrained(path).encode(prompt) for path in (folder, tmp_path / "model")]
    assert tokens[0] == tokens[1]


def test_exported_adapters_are_merged_and_the_run_folder_says_of_what(
    folder: Path, output: Path, tmp_path: Path
) -> None:
    """The same from the shares in a checkpoint as from the ranks when fitting ends."""
    config_of(folder, output / "adapters" / "config.yaml", lora=LORA)
    export_checkpoint(output / "adapters" / "checkpoints" / "last.ckpt", tmp_path / "model")
    exported, at_end, start = (
        AutoModelForCausalLM.from_pretrained(path).state_dict()
        for path in (tmp_path / "model", output / "adapters" / "model", folder)
    )
    assert_equal(exported, at_end)
    moved = {name for name, tensor in start.items() if not torch.equal(exported[name], tensor)}
    assert moved == {name for name in start if "q_proj" in name or "down_proj" in name}


def not_a_checkpoint(path: Path) -> Path:
    path.write_text("nothing")
    return path


def of_something_else(path: Path) -> Path:
    torch.save({"state_dict": {"net.weight": torch.zeros(1)}}, path)
    return path


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda path: path, "ckpt_path: expected a checkpoint, got .* which is none"),
        (not_a_checkpoint, "ckpt_path: expected a checkpoint, got"),
        (of_something_else, "ckpt_path: expected a checkpoint of a learner, got .* without a policy"),
    ],
)
def test_what_is_no_checkpoint(make: Callable[[Path], Path], message: str, tmp_path: Path) -> None:
    with pytest.raises(ValueError, match=message):
        policy_weights(make(tmp_path / "x.ckpt"))


def test_export_needs_the_configuration_of_the_run(folder: Path, output: Path, tmp_path: Path) -> None:
    export_it = partial(export_checkpoint, output / "whole of 1" / "step=4.ckpt", tmp_path / "model")
    with pytest.raises(ValueError, match="config: expected -c with the run's configuration"):
        export_it()
    with pytest.raises(ValueError, match=r"config: expected a YAML file, got .*nowhere"):
        export_it(tmp_path / "nowhere.yaml")
    with pytest.raises(ValueError, match=r"checkpoint: expected weights of .*, got others: Missing key"):
        export_it(config_of(folder, tmp_path / "other.yaml", lora=LORA))
    with pytest.raises(ValueError, match=r"config: expected model.init_args.policy in .*rank"):
        export_it(config_of(folder, tmp_path / "wrong.yaml", rank=3))
    assert not (tmp_path / "model").exists()


def test_the_strategy_divides_data_over_all_ranks(folder: Path) -> None:
    with process_group_of_its_own():
        strategy = FullySharded(save_distributed_checkpoint=True)
        supervised(folder, strategy, ranks=1, steps=1)
        assert strategy.distributed_sampler_kwargs == {"num_replicas": 1, "rank": 0}
        assert strategy.sharding.compute_dtype is None
        assert strategy.device_mesh["tensor_parallel"].size() == 1
