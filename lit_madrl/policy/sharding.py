"""Policies whose weights are divided over ranks (FSDP2): sharding, loading, and sampling from them.

Every forward of a sharded policy gathers each decoder layer from all ranks, so all ranks must make equally many
forwards. Training sees to it by its micro-batches; whatever samples or scores does so inside :func:`rollout_weights`.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, cast

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.checkpoint.state_dict import (
    StateDictOptions,
    get_model_state_dict,
    set_model_state_dict,
)
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import (
    CPUOffloadPolicy,
    FSDPModule,
    MixedPrecisionPolicy,
    OffloadPolicy,
    fully_shard,
)
from torch.distributed.tensor import DTensor

from lit_madrl.policy.packing import pack
from lit_madrl.policy.policy import Policy


@dataclass(frozen=True)
class Sharding:
    """How a policy is divided.

    Attributes:
        mesh: the ranks, one dimension.
        compute_dtype: of the gathered weights and of the computation; gradients are reduced and weights kept in
            the policy's own dtype. None computes in that as well.
        cpu_offload: keep weights, gradients and optimizer state in the hosts' memory.
        gather_rollouts: gather all layers at once for rollouts; else one layer at a time, with ranks in step.
    """

    mesh: DeviceMesh
    compute_dtype: torch.dtype | None = None
    cpu_offload: bool = False
    gather_rollouts: bool = True

    @property
    def weight_device(self) -> torch.device:
        """Where a rank's share of the weights lives."""
        kind = "cpu" if self.cpu_offload else self.mesh.device_type
        return torch.device(kind, torch.cuda.current_device()) if kind == "cuda" else torch.device(kind)


def shard(policy: Policy, sharding: Sharding) -> Policy:
    """Divide a policy over ranks in place: each decoder layer is a unit, the rest (embedding, norm, head) one more."""
    half = sharding.compute_dtype
    precision = MixedPrecisionPolicy(param_dtype=half, reduce_dtype=torch.float32 if half else None)
    offload = (
        CPUOffloadPolicy(pin_memory=torch.cuda.is_available()) if sharding.cpu_offload else OffloadPolicy()
    )
    for module in (*_decoder_layers(policy), policy):
        fully_shard(module, mesh=sharding.mesh, mp_policy=precision, offload_policy=offload)
    policy.sharding = sharding
    return policy


def _decoder_layers(policy: Policy) -> list[nn.Module]:
    names = set(policy.model._no_split_modules or ())
    return [module for module in policy.modules() if type(module).__name__ in names]


def shard_and_load(skeleton: Policy, weights: Mapping[str, Tensor], sharding: Sharding) -> Policy:
    """Shard a policy on the meta device and give it weights, one tensor at a time.

    Besides its share a rank holds one whole tensor at most. Only rank 0's ``weights`` are read.
    """
    policy = shard(skeleton, sharding)
    _allocate(policy, sharding.weight_device)
    options = StateDictOptions(full_state_dict=True, broadcast_from_rank0=True)
    set_model_state_dict(policy, dict(weights), options=options)
    return policy


def _allocate(policy: Policy, device: torch.device) -> None:
    made: dict[nn.Parameter, nn.Parameter] = {}  # tied parameters stay tied, which `to_empty` would forget
    for module in policy.modules():
        for name, parameter in list(module.named_parameters(recurse=False)):
            if parameter not in made:
                empty = torch.empty_like(parameter, device=device)
                made[parameter] = nn.Parameter(empty, parameter.requires_grad)
            setattr(module, name, made[parameter])


@contextmanager
def parameters_on_meta() -> Iterator[None]:
    """Parameters that modules get meanwhile have shapes and no values; buffers are real, as no checkpoint has all."""
    register = nn.Module.register_parameter

    def register_on_meta(module: nn.Module, name: str, param: nn.Parameter | None) -> None:
        if param is not None and not param.is_meta:  # one that is meta already may be tied: it stays itself
            param = nn.Parameter(param.to("meta"), param.requires_grad)
        register(module, name, param)

    nn.Module.register_parameter = register_on_meta  # type: ignore[method-assign, assignment]
    try:
        yield
    finally:
        nn.Module.register_parameter = register  # type: ignore[method-assign]


def frozen(policy: Policy) -> Policy:
    """The policy for forwards alone, in place: evaluation mode, no gradients, nothing gathered is kept for backward."""
    if policy.sharding is not None:
        cast(FSDPModule, policy).set_reshard_after_forward(True, recurse=False)
    return policy.requires_grad_(False).eval()


def whole_weights(policy: Policy) -> dict[str, Tensor]:
    """The policy's state dict; of a sharded one whole on rank 0 and empty elsewhere. A collective operation."""
    if policy.sharding is None:
        return policy.state_dict()
    options = StateDictOptions(full_state_dict=True, cpu_offload=True)
    return cast(dict[str, Tensor], get_model_state_dict(policy, options=options))


def local_weights(policy: Policy) -> list[Tensor]:
    """This rank's share of each parameter."""
    weights = [p.detach() for p in policy.parameters()]
    return [w.to_local() if isinstance(w, DTensor) else w for w in weights]


def clip_gradient(policy: Policy, max_norm: float) -> Tensor:
    """Scale the gradient down to ``max_norm``; its norm before, over all ranks."""
    norm = torch.nn.utils.clip_grad_norm_(policy.parameters(), max_norm)
    return norm.full_tensor() if isinstance(norm, DTensor) else norm


# Rollouts


@contextmanager
def rollout_weights(policy: Policy) -> Iterator[None]:
    """In here ranks may run the model as often as each likes, without gradients; nothing to do if it is not sharded.

    A collective operation. Either all weights are gathered once and freed at the end, or, where that is too much
    memory, each forward gathers layer by layer and ranks without work of their own answer the others' gathers; then
    any other collective operation in here must be preceded by :func:`meet`.
    """
    if policy.sharding is None:
        yield
        return
    root = cast(FSDPModule, policy)
    units = [m for m in policy.modules() if isinstance(m, FSDPModule)]
    kept = units if policy.sharding.gather_rollouts else [root]
    for module in kept:
        module.set_reshard_after_forward(False, recurse=False)
    in_step = None
    try:
        _forward_one_token(policy)  # gathers what is kept, and makes the policy, not a layer, FSDP's root
        if policy.sharding.gather_rollouts:
            yield
        else:
            in_step = policy.in_step = InStep(policy)
            yield
            in_step.wait()
    finally:
        policy.in_step = None
        if in_step is not None:
            in_step.close()
        for module in units:
            module.set_reshard_after_forward(module is not root, recurse=False)
        root.reset_iter_state()  # frees the gathered weights, and the trace of forwards that no backward follows


def meet(policy: Policy) -> None:
    """Before a collective operation within :func:`rollout_weights`: let all ranks arrive at it."""
    if policy.in_step is not None:
        policy.in_step.wait()


class InStep:
    """Ranks that run a layer-by-layer gathered model unequally often.

    Before each forward ranks agree whether any of them has one to make. A rank that waits makes one of a single
    token whenever another does, so every gather is answered.
    """

    def __init__(self, policy: Policy) -> None:
        self.policy = policy
        sharding = cast(Sharding, policy.sharding)
        self.group = sharding.mesh.get_group()
        self.device = sharding.mesh.device_type
        self.answering = False
        decoder = cast(nn.Module, policy.model.get_decoder())
        self.hook = decoder.register_forward_pre_hook(self._announce)

    def _announce(self, *_: Any) -> None:
        if not self.answering:
            self._any_busy(True)

    def wait(self) -> None:
        """Answer the other ranks' forwards until all of them wait."""
        self.answering = True
        while self._any_busy(False):
            _forward_one_token(self.policy)
        self.answering = False

    def close(self) -> None:
        """Announce no more."""
        self.hook.remove()

    def _any_busy(self, busy: bool) -> bool:
        flag = torch.tensor(int(busy), device=self.device)
        dist.all_reduce(flag, dist.ReduceOp.MAX, group=self.group)
        return bool(flag)


@torch.no_grad()
def _forward_one_token(policy: Policy) -> None:
    device = cast(Sharding, policy.sharding).mesh.device_type
    policy(pack([[0]], [[[0]]]).to(device))
