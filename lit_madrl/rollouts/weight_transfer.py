"""How the policy's weights get to vLLM servers: by files, or by a broadcast from the trainer."""

from __future__ import annotations

import os
import shutil
import tempfile
import threading
import weakref
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator
from concurrent.futures import FIRST_EXCEPTION, wait
from pathlib import Path
from typing import Any, ClassVar, NamedTuple

import torch
from safetensors.torch import save_file
from torch import Tensor, nn

from lit_madrl.rollouts.background import in_background
from lit_madrl.rollouts.policy_weights import named_weights, serving_config
from lit_madrl.rollouts.vllm_client import Server


class WeightTransfer(ABC):
    """Sends weights to servers. A version names the weights' values.

    Attributes:
        servers_are_shared: whether several ranks can send to one server.
    """

    servers_are_shared: ClassVar[bool] = True

    def server_options(self) -> dict[str, Any]:
        """What must be on the command line of a server that takes weights this way."""
        return {}

    @abstractmethod
    def keep(self, model: nn.Module, version: str) -> None:
        """Hold the present weights for :meth:`send`, whatever becomes of the model, until others are held."""

    @abstractmethod
    def send(self, server: Server, model: nn.Module, version: str) -> None:
        """Give a server the weights of that version: those kept, or else the present ones of ``model``.

        Several servers are sent to at the same time, each by a thread.

        Raises:
            UnavailableError: the server failed; it may be sent to again.
        """


class WeightsFolder:
    """A temporary folder for the weights of one version at a time, and those that servers start from.

    Args:
        parent: folder that it is made in; default that of the system.
    """

    def __init__(self, parent: str | None = None) -> None:
        self._parent = parent
        self._path: Path | None = None
        self._lock = threading.Lock()

    def write(self, model: nn.Module, name: str) -> Path:
        """The weights as a transformers folder, complete or not there at all; none is overwritten."""
        with self._lock:
            if self._path is None:
                if self._parent is not None:
                    Path(self._parent).mkdir(parents=True, exist_ok=True)
                self._path = Path(tempfile.mkdtemp(prefix="vllm_weights_", dir=self._parent)).resolve()
                weakref.finalize(self, shutil.rmtree, self._path, ignore_errors=True)
            target = self._path / name
            if target.exists():
                return target
            for old in self._path.glob("[0-9a-f]" * 16):
                shutil.rmtree(old)
            part = self._path / "part"
            shutil.rmtree(part, ignore_errors=True)
            serving_config(model).save_pretrained(part)
            weights = {key: value.detach().cpu().clone().contiguous() for key, value in named_weights(model)}
            save_file(weights, part / "model.safetensors", metadata={"format": "pt"})
            os.replace(part, target)
            return target


class FileTransfer(WeightTransfer):
    """By a file that the servers read.

    Args:
        folder: of files, which all servers see under the same path; default a temporary one.
    """

    def __init__(self, folder: str | None = None) -> None:
        self._folder = WeightsFolder(folder)

    def keep(self, model: nn.Module, version: str) -> None:
        """Write them."""
        self._folder.write(model, version)

    def send(self, server: Server, model: nn.Module, version: str) -> None:
        """See ``WeightTransfer.send``."""
        folder = self._folder.write(model, version)
        with server.changing_weights(version):
            server.call_workers("reload_weights", weights_path=str(folder))


class WeightMeta(NamedTuple):
    """What a receiver must know of a weight before it comes."""

    name: str
    dtype: torch.dtype
    shape: tuple[int, ...]


class WeightStream:
    """Weights one at a time, as often as they are asked for.

    Args:
        model: whose weights they are.
        device: that they are moved to.
        copies: of the weights; default the model's own.
    """

    def __init__(
        self, model: nn.Module, device: torch.device, copies: list[tuple[str, Tensor]] | None = None
    ) -> None:
        self._model = model
        self._device = device
        self._copies = copies

    def metadata(self) -> list[WeightMeta]:
        """In the order of the weights."""
        weights = self._copies if self._copies is not None else named_weights(self._model, merged=False)
        return [WeightMeta(name, weight.dtype, tuple(weight.shape)) for name, weight in weights]

    def fields(self) -> dict[str, Any]:
        """The same in JSON."""
        names, dtypes, shapes = zip(*self.metadata(), strict=True)
        dtype_names = [str(dtype).removeprefix("torch.") for dtype in dtypes]
        return {"names": names, "dtype_names": dtype_names, "shapes": shapes}

    def __iter__(self) -> Iterator[tuple[str, Tensor]]:
        for name, weight in self._copies if self._copies is not None else named_weights(self._model):
            yield name, weight.to(self._device).contiguous()


class BroadcastTransfer(WeightTransfer):
    """By a process group for each server: one that dies disturbs no other.

    Args:
        timeout: seconds.

    Raises:
        ValueError: ``timeout`` is not positive.
    """

    def __init__(self, timeout: float) -> None:
        if timeout <= 0:
            raise ValueError(f"{type(self).__name__}.timeout: expected a number > 0, got {timeout}")
        self.timeout = timeout
        self._kept: tuple[str, list[tuple[str, Tensor]]] = "", []

    def keep(self, model: nn.Module, version: str) -> None:
        """Copy them into the CPU's memory."""
        if self._kept[0] != version:
            self._kept = version, [(name, weight.cpu().clone()) for name, weight in named_weights(model)]

    def weights(self, model: nn.Module, version: str, device: torch.device) -> WeightStream:
        """Those that :meth:`send` sends."""
        kept, copies = self._kept
        return WeightStream(model, device, copies if kept == version else None)


def both(request: Callable[[], Any], work: Callable[[], Any]) -> Any:
    """Do both at once, as neither ends without the other; the result of ``work``, or the first failure.

    When ``work`` fails, ``request`` has a second to fail too, as a server's answer says more than that it has left.
    """
    futures = [in_background(request), in_background(work)]
    done = wait(futures, return_when=FIRST_EXCEPTION).done | wait(futures[:1], 1.0).done
    for future in futures:
        if future in done:
            future.result()
    return futures[1].result()
