"""Weights to vLLM servers by gloo: what the trainer does, and what receives them in the servers."""

from __future__ import annotations

import socket
import weakref
from collections.abc import Callable, Iterator
from datetime import timedelta
from typing import Any
from urllib.parse import urlsplit

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed import ProcessGroupGloo, TCPStore  # type: ignore[attr-defined, unused-ignore]

from lit_madrl.rollouts.vllm_client import Server, UnavailableError
from lit_madrl.rollouts.weight_transfer import BroadcastTransfer, WeightStream, both


class GlooGroup:
    """A process group apart from any other that the process is in; rank 0 broadcasts.

    Args:
        store: where the members find each other.
        rank: of this process.
        size: number of processes.
        address: of this process, as the others reach it.
        timeout: seconds to wait for the others, now and in each broadcast.

    Raises:
        RuntimeError: not all came.
    """

    def __init__(self, store: TCPStore, rank: int, size: int, address: str, timeout: float) -> None:
        gloo: Any = ProcessGroupGloo
        options = gloo._Options()
        options._timeout = timedelta(seconds=timeout)
        options._devices = [gloo.create_device(hostname=address)]
        self._group: Any = gloo(store, rank, size, options)

    def broadcast(self, tensor: Tensor) -> None:
        """Send or receive a contiguous tensor on the CPU.

        Raises:
            RuntimeError: a process has left or does not answer, or the group is closed.
        """
        if self._group is None:
            raise RuntimeError("the process group is closed")
        data = tensor.reshape(-1).view(torch.uint8)
        self._group.broadcast(data, 0).wait()

    def close(self) -> None:
        """Leave; the others notice at once."""
        self._group = None  # gloo disconnects when nothing refers to it, and has no other way to


def own_address(host: str, port: int) -> str:
    """The address of this machine that ``host`` sees."""
    family, kind, _, _, target = socket.getaddrinfo(host, port, type=socket.SOCK_DGRAM)[0]
    with socket.socket(family, kind) as probe:
        probe.connect(target)  # looks up the route and sends nothing
        return str(probe.getsockname()[0])


class GlooTransfer(BroadcastTransfer):
    """By gloo, over the CPU's memory and TCP.

    Servers that the engine does not start itself need this package and the option that :meth:`server_options` gives,
    and must reach the trainer by the address that it reaches them from, on any port.

    Args:
        timeout: seconds to wait for a server that does not take a tensor; one that dies is noticed at once.
    """

    def __init__(self, timeout: float = 60.0) -> None:
        super().__init__(timeout)
        self._groups: dict[str, tuple[int, GlooGroup]] = {}
        weakref.finalize(self, self._groups.clear)  # gloo's threads must not outlive the interpreter

    def server_options(self) -> dict[str, Any]:
        """See ``WeightTransfer.server_options``."""
        return {"worker-extension-cls": f"{__name__}.{WeightReceiver.__name__}"}

    def send(self, server: Server, model: nn.Module, version: str) -> None:
        """See ``WeightTransfer.send``."""
        weights = self.weights(model, version, torch.device("cpu"))
        fields = weights.fields()
        with server.changing_weights(version):
            if server.url not in self._groups:
                self._groups[server.url] = self._join(server)
            port, group = self._groups[server.url]
            try:
                both(
                    lambda: server.call_workers("receive_weights", trainer=_rank(), port=port, **fields),
                    lambda: _broadcast(group, weights),
                )
            except BaseException:
                self._groups.pop(server.url)[1].close()
                raise

    def _join(self, server: Server) -> tuple[int, GlooGroup]:
        target = urlsplit(server.url)
        address = own_address(target.hostname or "", target.port or 80)
        limit = timedelta(seconds=self.timeout)
        store = TCPStore(address, 0, is_master=True, wait_for_workers=False, timeout=limit)
        size = 1 + server.number_of_workers()
        place = {"address": address, "port": store.port, "size": size, "timeout": self.timeout}

        def joined() -> GlooGroup:
            try:
                return GlooGroup(store, 0, size, address, self.timeout)
            except RuntimeError as error:
                raise UnavailableError(f"gloo: {error}") from error

        return store.port, both(lambda: server.call_workers("join_trainer", trainer=_rank(), **place), joined)


def _rank() -> int:
    return dist.get_rank() if dist.is_initialized() else 0


def _broadcast(group: GlooGroup, weights: WeightStream) -> None:
    for _, weight in weights:
        try:
            group.broadcast(weight)
        except RuntimeError as error:
            raise UnavailableError(f"gloo: {error}") from error


class WeightReceiver:
    """What a vLLM worker learns by ``--worker-extension-cls``; the methods are called by ``/collective_rpc``."""

    parallel_config: Any  # this and what follows are the worker's own
    model_runner: Any
    reload_weights: Callable[..., None]
    trainer_groups: dict[int, tuple[int, GlooGroup]]

    def join_trainer(self, trainer: int, address: str, port: int, size: int, timeout: float) -> None:
        """Make a group with rank ``trainer`` of the training, in place of the one that there may be."""
        self.trainer_groups = getattr(self, "trainer_groups", {})
        if trainer in self.trainer_groups:
            self.trainer_groups.pop(trainer)[1].close()
        parallel = self.parallel_config
        rank = 1 + parallel.data_parallel_index * parallel.world_size + parallel.rank
        store = TCPStore(address, port, is_master=False, timeout=timedelta(seconds=timeout))
        group = GlooGroup(store, rank, size, own_address(address, port), timeout)
        self.trainer_groups[trainer] = port, group

    def receive_weights(
        self, trainer: int, port: int, names: list[str], dtype_names: list[str], shapes: list[list[int]]
    ) -> None:
        """Load what rank ``trainer`` broadcasts, one tensor after the other."""
        joined, group = getattr(self, "trainer_groups", {}).get(trainer, (None, None))
        if group is None or joined != port:
            raise RuntimeError(
                f"rank {trainer} of the training: expected join_trainer before receive_weights"
            )
        try:
            self.reload_weights(weights_iterator=received(group, names, dtype_names, shapes))
        except BaseException:
            self.trainer_groups.pop(trainer)[1].close()
            self._end_reload()
            raise

    def _end_reload(self) -> None:
        """Layers that received a part of their weights could not be loaded again without it."""
        from vllm.model_executor.model_loader.reload import (  # type: ignore[import-not-found, unused-ignore]
            finalize_layerwise_reload,
        )

        finalize_layerwise_reload(self.model_runner.get_model(), self.model_runner.model_config)


def received(
    group: GlooGroup, names: list[str], dtype_names: list[str], shapes: list[list[int]]
) -> Iterator[tuple[str, Tensor]]:
    """Weights as they come; each is a new tensor, as the loader holds them until a layer is complete."""
    for name, dtype, shape in zip(names, dtype_names, shapes, strict=True):
        weight = torch.empty(shape, dtype=getattr(torch, dtype))
        group.broadcast(weight)
        yield name, weight
