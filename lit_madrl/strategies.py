"""Strategies beyond Lightning's own: training with all weights divided over ranks."""

from __future__ import annotations

import os
import shutil
from collections.abc import Mapping
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch
from lightning.pytorch.strategies import ModelParallelStrategy
from torch import Tensor, nn
from torch.distributed.checkpoint.state_dict import (
    StateDictOptions,
    set_model_state_dict,
    set_optimizer_state_dict,
)
from torch.distributed.fsdp import FSDPModule
from torch.optim import Optimizer

from lit_madrl.policy.sharding import Sharding

PART, OLD = ".part", ".old"
"""Endings of what is being saved, and of what is being replaced by it."""


def check_precision(precision: str) -> None:
    """Refuse the trainer's precisions that change more than they say.

    ``bf16-true`` also rounds what is no weight: the frequencies of positions, an angle of up to a radian after 1000
    tokens, and every number made during a step, such as rewards and advantages. ``16-mixed`` scales gradients, which
    clipping and the check that they are finite would see.

    Raises:
        ValueError: it is one of those.
    """
    if precision not in ("32-true", "bf16-mixed"):
        raise ValueError(
            "trainer.precision: expected 32-true or bf16-mixed (for weights in bfloat16: policy.dtype: bfloat16 with "
            f"32-true), got {precision}"
        )


class FullySharded(ModelParallelStrategy):
    """FSDP2 over all ranks: weights, gradients and optimizer state are divided, batches too.

    With ``trainer.precision: 32-true`` all is in the policy's dtype. With ``bf16-mixed`` the gathered weights and the
    computation are in bfloat16; a rank's share of weights and optimizer state, and the sum of gradients over ranks, are
    in the policy's dtype (float32). ``policy.gradient_checkpointing`` saves activations.

    Gradients are reduced after every micro-batch: kept whole between them they would take a model's memory on each
    rank.

    Args:
        gather_rollouts: gather all weights at once on every rank for rollouts and evaluation, the faster way. When
            they do not fit, false gathers one decoder layer at a time, in every forward.
        cpu_offload: keep weights, gradients and optimizer state in host memory.
        save_distributed_checkpoint: a checkpoint is a folder to which each rank writes its share; else one file,
            gathered by rank 0. Both can be resumed on any number of ranks and exported.
        process_group_backend: default the device's own; with ``cpu_offload`` on GPUs both gloo and nccl.
        timeout: of collectives.
    """

    def __init__(
        self,
        gather_rollouts: bool = True,
        cpu_offload: bool = False,
        save_distributed_checkpoint: bool = False,
        process_group_backend: str | None = None,
        timeout: timedelta = timedelta(minutes=30),
    ) -> None:
        super().__init__(
            save_distributed_checkpoint=save_distributed_checkpoint,
            process_group_backend=process_group_backend,
            timeout=timeout,
        )
        self.gather_rollouts = gather_rollouts
        self.cpu_offload = cpu_offload

    @property
    def sharding(self) -> Sharding:
        """How ``configure_model`` is to divide the policy."""
        mixed = self.precision_plugin.precision == "bf16-mixed"
        return Sharding(
            mesh=self.device_mesh["data_parallel"],
            compute_dtype=torch.bfloat16 if mixed else None,
            cpu_offload=self.cpu_offload,
            gather_rollouts=self.gather_rollouts,
        )

    def setup_environment(self) -> None:
        """Start the processes' group. Lightning's default would be tensor parallelism within a node."""
        self._data_parallel_size = self.num_nodes * self.num_processes
        self._tensor_parallel_size = 1
        if self.cpu_offload and self._process_group_backend is None and self.root_device.type == "cuda":
            self._process_group_backend = "cpu:gloo,cuda:nccl"
        super().setup_environment()

    def model_to_device(self) -> None:
        """Move all but what is sharded, which is where it belongs."""
        module = self.lightning_module
        assert module is not None
        sharded = {name: child for name, child in module.named_children() if isinstance(child, FSDPModule)}
        for name in sharded:
            setattr(module, name, None)
        module.to(self.root_device)
        for name, child in sharded.items():
            setattr(module, name, child)

    def save_checkpoint(
        self, checkpoint: dict[str, Any], filepath: str | Path, storage_options: Any | None = None
    ) -> None:
        """Replace the checkpoint at ``filepath``, if any, by a whole one: a folder is written beside it and renamed."""
        if not self._save_distributed_checkpoint:
            super().save_checkpoint(checkpoint, filepath, storage_options)
            return
        final = Path(self.broadcast(filepath))
        part = final.with_name(final.name + PART)
        if self.is_global_zero:
            tidy(final.parent)
        self.barrier()
        super().save_checkpoint(checkpoint, part, storage_options)
        self.barrier()
        if self.is_global_zero:
            sync(part / "meta.pt")  # torch has seen to the shares
            sync(part)
            put_in_place(part, final)

    def remove_checkpoint(self, filepath: str | Path) -> None:
        """Remove a checkpoint; a folder first gets the name of what is not whole."""
        path = Path(filepath)
        if self.is_global_zero and path.is_dir() and not path.is_symlink():
            part = path.with_name(path.name + PART)
            remove(part)
            filepath = path.rename(part)
        super().remove_checkpoint(filepath)

    def load_checkpoint(
        self, checkpoint_path: str | Path, weights_only: bool | None = None
    ) -> dict[str, Any]:
        """Load what this strategy or a single device wrote; what is left are neither weights nor optimizers.

        Raises:
            ValueError: a file has weights of another policy.
        """
        path = Path(self.broadcast(checkpoint_path))
        if path.is_dir():
            return super().load_checkpoint(path, weights_only)
        model = self.model
        assert model is not None
        checkpoint: dict[str, Any] = torch.load(
            path, mmap=True, map_location="cpu", weights_only=weights_only
        )
        whole = StateDictOptions(full_state_dict=True, broadcast_from_rank0=True)
        check_weights(model, checkpoint["state_dict"])
        set_model_state_dict(model, checkpoint.pop("state_dict"), options=whole)
        names = {parameter: name for name, parameter in model.named_parameters()}
        for optimizer, state in zip(self.optimizers, checkpoint.pop("optimizer_states", []), strict=False):
            set_optimizer_state_dict(model, optimizer, _by_name(state, optimizer, names), options=whole)
        return checkpoint


def check_weights(module: nn.Module, weights: Mapping[str, Tensor]) -> None:
    """Whether a checkpoint's weights are those of a module, by names and shapes.

    Raises:
        ValueError: they are others.
    """
    expected, given = (
        {name: tuple(tensor.shape) for name, tensor in state.items()}
        for state in (module.state_dict(), weights)
    )
    for name in sorted(expected.keys() | given.keys()):
        shapes = expected.get(name, "absent"), given.get(name, "absent")
        if shapes[0] != shapes[1]:
            raise ValueError(
                f"ckpt_path: expected weights of this policy, got others: {name} is {shapes[1]} instead of {shapes[0]}"
            )


def _by_name(state: dict[str, Any], optimizer: Optimizer, names: dict[nn.Parameter, str]) -> dict[str, Any]:
    """An optimizer's state by names of parameters. Their places in the groups say whose a number is.

    Lightning takes the number for a place among all parameters, which it is not where some are frozen.
    """
    name_of: dict[Any, str] = {}
    groups = []
    for saved, group in zip(state["param_groups"], optimizer.param_groups, strict=True):
        own = [names[parameter] for parameter in group["params"]]
        name_of |= zip(saved["params"], own, strict=True)
        groups.append({**saved, "params": own})
    return {
        "state": {name_of[number]: values for number, values in state["state"].items()},
        "param_groups": groups,
    }


# Replacing a checkpoint


def tidy(folder: Path) -> None:
    """End what processes that died while saving had begun in a folder of checkpoints; for one process at a time."""
    for part in folder.glob(f"*{PART}"):
        remove(part)
    for old in folder.glob(f"*{OLD}"):
        final = old.with_suffix("")
        if os.path.lexists(final):
            remove(old)
        else:
            old.rename(final)


def put_in_place(part: Path, final: Path) -> None:
    """Rename ``part`` to ``final``. At every moment ``final`` is a whole checkpoint, or ``final.old`` is."""
    old = final.with_name(final.name + OLD)
    if os.path.lexists(final) and (part.is_dir() or final.is_dir()):  # which cannot be replaced at once
        final.rename(old)
    part.replace(final)
    sync(final.parent)  # the new name, too, must survive a power cut
    remove(old)


def sync(path: Path) -> None:
    """Wait until a file, or the names in a folder, are on the disk."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def remove(path: Path) -> None:
    """Remove a file, a link or a folder; nothing if there is none."""
    if path.is_dir() and not path.is_symlink():
        shutil.rmtree(path)
    else:
        path.unlink(missing_ok=True)
