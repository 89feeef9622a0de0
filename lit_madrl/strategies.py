"""Strategies beyond Lightning's own: training with all weights divided over ranks."""

from __future__ import annotations

from datetime import timedelta

import torch
from lightning.pytorch.strategies import ModelParallelStrategy
from torch.distributed.fsdp import FSDPModule

from lit_madrl.policy.sharding import Sharding


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
