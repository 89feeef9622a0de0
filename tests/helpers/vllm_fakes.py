"""Stand-ins for vLLM's servers, and what tests with them have in common."""

from __future__ import annotations

import json
import socket
import threading
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from types import SimpleNamespace
from typing import Any, ClassVar

import torch
from safetensors.torch import load_file
from torch import nn

from lit_madrl.rollouts import RolloutEngine, VLLMServerEngine
from lit_madrl.rollouts.vllm_client import Server
from lit_madrl.rollouts.weight_transfer_gloo import WeightReceiver
from lit_madrl.types import Rollouts, Sampling
from tests.helpers.engine_contract import PROMPTS, STOP


class FakeWorker(WeightReceiver):
    """A worker that keeps the weights as they came; ``on_weight`` may break it before it takes the next."""

    def __init__(self, rank: int, size: int) -> None:
        self.parallel_config = SimpleNamespace(data_parallel_index=0, world_size=size, rank=rank)
        self.weights: dict[str, torch.Tensor] = {}
        self.on_weight: Callable[[str], None] = lambda name: None
        self.reloads_ended = 0

    def reload_weights(
        self, weights_path: str = "", weights_iterator: Iterator[tuple[str, torch.Tensor]] | None = None
    ) -> None:
        self.weights = {}
        weights = weights_iterator or load_file(Path(weights_path) / "model.safetensors").items()
        for name, weight in weights:
            self.weights[name] = weight
            self.on_weight(name)

    def _end_reload(self) -> None:
        self.reloads_ended += 1


class FakeServer:
    """What the engine uses of a vLLM server. Completions repeat the prompt's last token; logprobs are -1.

    ``on_generate`` may change or break it while it answers.
    """

    def __init__(self, port: int = 0, workers: int = 1) -> None:
        self.version = "default"
        self.workers = [FakeWorker(rank, workers) for rank in range(workers)]
        self.requests: list[tuple[str, dict[str, Any]]] = []
        self.generated: list[dict[str, Any]] = []
        self.on_generate: Callable[[FakeServer], None] = lambda server: None
        self.max_model_len = 1000
        fake = self

        class Handler(BaseHTTPRequestHandler):
            def do_GET(self) -> None:
                self.answer({"weight_version": fake.version, "world_size": len(fake.workers)})

            def do_POST(self) -> None:
                body = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
                try:
                    self.answer(fake.post(self.path.split("?")[0], body))
                except PermissionError:
                    self.send_error(400, "refused")
                except ConnectionError:
                    self.connection.shutdown(socket.SHUT_RDWR)
                except (RuntimeError, AttributeError):
                    self.send_error(500, "engine dead")

            def answer(self, body: Any) -> None:
                data = json.dumps(body).encode()
                self.send_response(200)
                self.send_header("Content-Length", str(len(data)))
                self.end_headers()
                self.wfile.write(data)

            def log_message(self, *args: Any) -> None:
                pass

        self.http = ThreadingHTTPServer(("127.0.0.1", port), Handler)
        self.port = self.http.server_address[1]
        self.url = f"http://127.0.0.1:{self.port}"
        threading.Thread(target=self.http.serve_forever, args=(0.01,), daemon=True).start()

    @property
    def weights(self) -> dict[str, torch.Tensor]:
        return self.workers[0].weights

    def forget(self) -> None:
        """Restart."""
        self.version = "default"
        self.workers = [FakeWorker(rank, len(self.workers)) for rank in range(len(self.workers))]

    def post(self, path: str, body: dict[str, Any]) -> Any:
        self.requests.append((path, body))
        if path == "/update_weight_version":
            self.version = body["new_version"]
        elif path == "/collective_rpc":
            methods = [getattr(worker, body["method"]) for worker in self.workers]
            with ThreadPoolExecutor() as pool:
                list(pool.map(lambda method: method(**body["kwargs"]), methods))
        elif path == "/inference/v1/generate":
            self.on_generate(self)
            self.generated.append(body)
            return {"choices": [self.choice(body, i) for i in range(body["sampling_params"]["n"])]}
        return {"success": True}

    def choice(self, body: dict[str, Any], index: int) -> dict[str, Any]:
        room = min(body["sampling_params"]["max_tokens"], self.max_model_len - len(body["token_ids"]))
        return {
            "index": index,
            "finish_reason": "length",
            "token_ids": body["token_ids"][-1:] * room,
            "logprobs": {"content": [{"logprob": -1.0}] * room},
            "weight_versions": [{"version": self.version, "start": 0, "end": room}],
        }

    def stop(self) -> None:
        self.http.shutdown()
        self.http.server_close()


class FakeChild(Server):
    """Stands for a started server; ``options`` are those of its command line."""

    started: ClassVar[list[FakeChild]] = []

    def __init__(self, model: Path, options: dict[str, Any], environment: dict[str, str], *_: Any) -> None:
        self.fake, self.model, self.options, self.environment = FakeServer(), model, options, environment
        super().__init__(self.fake.url)
        self.started.append(self)

    def stop(self) -> None:
        self.fake.stop()


def engine_for(servers: list[FakeServer], model: nn.Module, **kwargs: Any) -> VLLMServerEngine:
    engine = VLLMServerEngine([server.url for server in servers], **kwargs)
    engine.sync_weights(model)
    return engine


def sample(engine: RolloutEngine, **kwargs: Any) -> Rollouts:
    return engine.generate(PROMPTS, Sampling(group_size=3, max_new_tokens=2), [STOP], **kwargs)


def assert_complete(rollouts: Rollouts) -> None:
    """Every row is what the fakes answer."""
    assert rollouts.completions() == [[[prompt[-1]] * 2] * 3 for prompt in PROMPTS]
    assert (rollouts.sampler_logprobs == -1).all()
