"""Weights to vLLM servers by vLLM's own NCCL transfer, from GPU to GPU."""

from __future__ import annotations

import socket
import threading
from collections.abc import Callable
from concurrent.futures import wait
from typing import Any, ClassVar
from urllib.parse import urlsplit

import torch
from torch import nn

from lit_madrl.rollouts.background import in_background
from lit_madrl.rollouts.vllm_client import CHANGING, UNCHANGED, Server, UnavailableError
from lit_madrl.rollouts.weight_transfer import BroadcastTransfer, WeightStream
from lit_madrl.rollouts.weight_transfer_gloo import own_address


class NCCLTransfer(BroadcastTransfer):
    """By NCCL, between the policy's GPU and those of the servers, one server after the other.

    A server that a transfer failed on is in an unknown state: it is started again if it is the engine's, and else
    not used until someone has. A server belongs to one rank. Servers that the engine does not start itself need the
    option that :meth:`server_options` gives.

    Args:
        timeout: seconds for a whole transfer, the first contact included.
    """

    servers_are_shared: ClassVar[bool] = False

    def __init__(self, timeout: float = 300.0) -> None:
        super().__init__(timeout)
        self._channels: dict[str, Any] = {}
        self._one_at_a_time = threading.Lock()  # vLLM's transfers have their streams in common

    def server_options(self) -> dict[str, Any]:
        """See ``WeightTransfer.server_options``."""
        return {"weight-transfer-config": '{"backend": "nccl"}'}

    def send(self, server: Server, model: nn.Module, version: str) -> None:
        """See ``WeightTransfer.send``."""
        device = next(model.parameters()).device
        weights = self.weights(model, version, device)
        with self._one_at_a_time:
            present = server.weight_version()
            if present == CHANGING:
                raise UnavailableError(
                    "a transfer of weights to it failed, and it was not started again since"
                )
            if present == UNCHANGED:  # it may have been started again, and knows of no process group
                self._leave(server)
            try:
                server.call("/pause?mode=keep", {})  # its model is not whole until the end
                with server.changing_weights(version):
                    self._within_timeout(lambda: self._channel(server, weights).send_weights(), device)
                server.call("/resume", {})
            except BaseException:
                self._leave(server)
                server.stop()
                raise

    def _leave(self, server: Server) -> None:
        if channel := self._channels.pop(server.url, None):
            channel.shutdown()  # aborts what still waits for the server

    def _within_timeout(self, work: Callable[[], None], device: torch.device) -> None:
        def on_device() -> None:
            if device.type == "cuda":
                torch.cuda.set_device(device)  # that of a new thread is the first
            work()

        future = in_background(on_device)
        if not wait([future], self.timeout).done:
            raise UnavailableError(f"NCCL: the weights were not sent within {self.timeout:g} s")
        try:
            future.result()
        except RuntimeError as error:
            raise UnavailableError(f"NCCL: {error}") from error

    def _channel(self, server: Server, weights: WeightStream) -> Any:
        """vLLM's sender to the server, which shares a process group with it."""
        from vllm.distributed.weight_transfer import (  # type: ignore[import-not-found, unused-ignore]
            WeightTransferTrainerFactory,
        )
        from vllm.distributed.weight_transfer.nccl_engine import (  # type: ignore[import-not-found, unused-ignore]
            NCCLTrainerInitInfo,
        )

        if server.url not in self._channels:
            target = urlsplit(server.url)
            address = own_address(target.hostname or "", target.port or 80)
            with socket.socket() as probe:
                probe.bind(("", 0))
                port = probe.getsockname()[1]
            place = NCCLTrainerInitInfo(address, port, 1 + server.number_of_workers(), rank=0)
            self._channels[server.url] = WeightTransferTrainerFactory.trainer_init(
                place, client=Control(server), source=weights
            )
        channel = self._channels[server.url]
        channel.source = weights
        return channel


class Control:
    """The requests of vLLM's sender, as it wants to make them."""

    def __init__(self, server: Server) -> None:
        self._server = server

    def init_weight_transfer_engine(self, init_info: dict[str, Any]) -> None:
        """Make the process group."""
        self._server.call("/init_weight_transfer_engine", {"init_info": init_info})

    def start_weight_update(self) -> None:
        """Get ready."""
        self._server.call("/start_weight_update", {})

    def update_weights(self, update_info: dict[str, Any]) -> None:
        """Receive what is sent meanwhile."""
        self._server.call("/update_weights", {"update_info": update_info})

    def finish_weight_update(self, weight_version: str | None = None) -> None:
        """Make use of it."""
        self._server.call("/finish_weight_update", {"weight_version": weight_version})
