"""Rollouts by vLLM servers: processes of their own, on this machine or on others, reached over HTTP."""

from __future__ import annotations

import hashlib
import time
import weakref
from collections import Counter
from collections.abc import Sequence
from concurrent.futures import Future, ThreadPoolExecutor, wait
from itertools import cycle
from typing import Any, ClassVar

import torch
import torch.distributed as dist
from torch import nn

from lit_madrl.rollouts.background import in_background
from lit_madrl.rollouts.policy_weights import fingerprint, serving_config
from lit_madrl.rollouts.vllm_base import Continuation, Job, VLLMBase, request_fields, room_for
from lit_madrl.rollouts.vllm_child import ChildServer
from lit_madrl.rollouts.vllm_client import Server, UnavailableError
from lit_madrl.rollouts.weight_transfer import FileTransfer, WeightsFolder, WeightTransfer
from lit_madrl.types import Rollouts, Sampling

SHORTEST_PAUSE, LONGEST_PAUSE = 0.1, 2.0
"""Seconds between two attempts of which the first got nothing; each pause is twice the last."""


class VLLMServerEngine(VLLMBase):
    """Sends each prompt to one of several vLLM servers and the policy's weights to all of them.

    A server that fails loses nothing: its prompts go to another one, or to itself once it runs again, with the
    weights and the seeds that they had. Weights carry a version made of their values, every completion names the
    version of each of its tokens, and others are not accepted. So ranks with equal weights can share servers.

    Servers that the engine does not start itself need ``VLLM_SERVER_DEV_MODE=1`` and the options ``--tokens-only
    --skip-tokenizer-init --logprobs-mode processed_logprobs --generation-config vllm``, on a CPU also
    ``--no-enable-chunked-prefill``; ``--model`` is any model of the policy's architecture.

    Args:
        urls: of running servers; none starts ``launch`` servers on this machine, for this rank alone.
        launch: how many servers to start when there are no ``urls``.
        devices: ``CUDA_VISIBLE_DEVICES`` of each server to start, one server each, for example ``["1", "2,3"]``.
        options: further command-line options of servers to start, for example ``{"tensor-parallel-size": 2}``;
            without ``max-model-len``, a longer ``generate`` starts them anew for twice its length.
        weights_dir: folder for weights that servers read, under the same path as this process; default a temporary
            one.
        weight_transfer: how weights are sent; default by files in ``weights_dir``.
        timeout: seconds until an unanswered request counts as failed.
        patience: seconds without any completion until the servers are given up; a start takes a minute.
        concurrency: requests in flight at each server.
        seed: start of the random stream.

    Raises:
        ValueError: a number is out of range.
    """

    generates_ahead: ClassVar[bool] = True

    def __init__(
        self,
        urls: Sequence[str] = (),
        launch: int = 1,
        devices: Sequence[str] = (),
        options: dict[str, Any] | None = None,
        weights_dir: str | None = None,
        weight_transfer: WeightTransfer | None = None,
        timeout: float = 600.0,
        patience: float = 600.0,
        concurrency: int = 64,
        seed: int = 0,
    ) -> None:
        super().__init__(seed)
        if isinstance(urls, str) or not all(url.startswith(("http://", "https://")) for url in urls):
            raise ValueError(f"VLLMServerEngine.urls: expected a list of http://HOST:PORT, got {urls!r}")
        for name, value in (("launch", launch), ("concurrency", concurrency)):
            if value < 1:
                raise ValueError(f"VLLMServerEngine.{name}: expected an integer >= 1, got {value}")
        for name, seconds in (("timeout", timeout), ("patience", patience)):
            if seconds <= 0:
                raise ValueError(f"VLLMServerEngine.{name}: expected a number > 0, got {seconds}")
        self.urls = tuple(urls)
        self.devices = tuple(devices) or (None,) * launch
        self.options = options or {}
        self.weight_transfer = weight_transfer or FileTransfer(weights_dir)
        self.timeout = timeout
        self.patience = patience
        self.concurrency = concurrency
        self.servers: list[Server] = [Server(url, timeout) for url in urls]
        self._served: dict[str, Any] = {}
        self._length = 0
        self._troubles: dict[str, UnavailableError] = {}
        self._failures: Counter[str] = Counter()
        self._version = ""
        self._folder = WeightsFolder(weights_dir)  # that servers start from
        self._finalizer: weakref.finalize[Any, Any] | None = None
        self._in_flight: Future[Rollouts] | None = None

    @torch.no_grad()
    def generate_ahead(
        self, prompts: Sequence[Sequence[int]], sampling: Sampling, stop_ids: Sequence[int]
    ) -> Future[Rollouts]:
        """See ``RolloutEngine.generate_ahead``."""
        finish = self._begin(prompts, sampling, stop_ids)
        if self._model is not None:  # their values are about to change, and any server may need them later
            self.weight_transfer.keep(self._model, self._version)
        self._in_flight = in_background(finish)
        return self._in_flight

    def _prepare(self, model: nn.Module, length: int) -> None:
        if self._in_flight is not None:
            wait([self._in_flight])
            self._in_flight = None
        self._provide(model, length)

    def _complete(
        self, model: nn.Module, jobs: list[Job], sampling: Sampling, stop_ids: list[int]
    ) -> list[list[Continuation]]:
        self._troubles.clear()
        self._failures.clear()
        requests = [(job, request_fields(job, sampling, stop_ids)) for job in jobs]
        done: dict[int, list[Continuation]] = {}
        moved, pause = time.monotonic(), SHORTEST_PAUSE
        with ThreadPoolExecutor(self.concurrency * len(self.servers)) as pool:
            while pending := {i: request for i, request in enumerate(requests) if i not in done}:
                answers = self._ask(pool, self._ready(pool, model), pending)
                done.update(answers)
                if answers:
                    moved, pause = time.monotonic(), SHORTEST_PAUSE
                    continue
                if time.monotonic() - moved > self.patience:
                    reasons = "; ".join(f"{url}: {trouble}" for url, trouble in self._troubles.items())
                    raise RuntimeError(
                        f"VLLMServerEngine: expected a completion within {self.patience:g} s, got none ({reasons})"
                    )
                time.sleep(pause)
                pause = min(2 * pause, LONGEST_PAUSE)
        return [done[i] for i in range(len(jobs))]

    def _ready(self, pool: ThreadPoolExecutor, model: nn.Module) -> list[Server]:
        """The servers that run, with the present weights: those that do not have them get them."""

        def is_ready(server: Server) -> bool:
            try:
                if server.weight_version() != self._version:
                    self.weight_transfer.send(server, model, self._version)
            except UnavailableError as trouble:
                self._troubles[server.url] = trouble
                server.revive()
                return False
            return True

        return [
            server
            for server, ready in zip(self.servers, pool.map(is_ready, self.servers), strict=True)
            if ready
        ]

    def _ask(
        self,
        pool: ThreadPoolExecutor,
        ready: list[Server],
        pending: dict[int, tuple[Job, dict[str, Any]]],
    ) -> dict[int, list[Continuation]]:
        """Ask for everything that is pending, each at one of the servers that failed least; what they answered."""
        fewest = min((self._failures[server.url] for server in ready), default=0)
        used = [server for server in ready if self._failures[server.url] == fewest]
        if not used:
            return {}
        asked = {
            i: (server, pool.submit(server.complete, job, fields, self._version))
            for (i, (job, fields)), server in zip(pending.items(), cycle(used), strict=False)
        }
        answers = {}
        for i, (server, answer) in asked.items():
            try:
                answers[i] = answer.result()
            except UnavailableError as trouble:
                self._troubles[server.url] = trouble
                self._failures[server.url] += 1
        return answers

    def _provide(self, model: nn.Module, length: int) -> None:
        """Name the weights' version; start servers where there are none for this architecture and length."""
        self._version = hashlib.sha256(fingerprint(model).cpu().numpy().tobytes()).hexdigest()[:16]
        config = serving_config(model)
        shared = self.urls and dist.is_initialized() and dist.get_world_size() > 1
        if shared and not self.weight_transfer.servers_are_shared:
            raise ValueError(
                f"VLLMServerEngine.weight_transfer: expected one by which several ranks can send to the same urls, got "
                f"{type(self.weight_transfer).__name__}; start servers for each rank, or use another"
            )
        if self.urls or (config.to_dict() == self._served and length <= self._length):
            return
        self.close()
        folder = self._folder.write(model, "start")
        on_gpu = torch.cuda.is_available()
        options = {
            "tokens-only": True,
            "skip-tokenizer-init": True,
            "logprobs-mode": "processed_logprobs",
            "generation-config": "vllm",
            "dtype": str(next(model.parameters()).dtype).removeprefix("torch."),
            "max-model-len": room_for(config, length),
            **({} if on_gpu else {"no-enable-chunked-prefill": True, "enforce-eager": True}),
            **({} if on_gpu else {"kv-cache-memory-bytes": 1 << 30}),
            **self.weight_transfer.server_options(),
            **self.options,
        }
        children = [
            ChildServer(
                folder,
                options,
                {} if device is None else {"CUDA_VISIBLE_DEVICES": device},
                folder.parent / f"server_{number}.log",
                self.timeout,
            )
            for number, device in enumerate(self.devices)
        ]
        self.servers = list(children)
        self._served = config.to_dict()
        self._length = int(options["max-model-len"])
        self._finalizer = weakref.finalize(self, _stop, children)  # also when the program ends

    def close(self) -> None:
        """End the servers that the engine has started; the next ``generate`` starts them anew."""
        if self._finalizer is not None:
            self._finalizer()
            self._finalizer = None
            self.servers = []
            self._served = {}


def _stop(children: Sequence[ChildServer]) -> None:
    for child in children:
        child.stop()
