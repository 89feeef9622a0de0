"""Ways to compute the attention of a packed group: the plan's, and others that give the same numbers."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import partial
from typing import Any, NamedTuple
from unittest import mock

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.nn.attention import SDPBackend
from torch.nn.attention.bias import CausalBias, causal_lower_right

from lit_madrl.policy.attention import AttentionPlan, GroupRows, dense_groups, group_rows

Attend = Callable[[Tensor, Tensor, Tensor], Tensor]


class AttentionPath(NamedTuple):
    """``attend`` maps ``[N, H, D]``, ``[N, K, D]``, ``[N, K, D]`` to ``[N, H, D]``; ``backward`` if it has one here."""

    name: str
    attend: Attend
    backward: bool = True

    def backend(self, query: Tensor, key: Tensor, value: Tensor) -> list[str]:
        """The SDPA backends of its calls, in their order; empty where it makes none."""
        chosen: list[str] = []

        def spy(q: Tensor, k: Tensor, v: Tensor, attn_mask: Any = None, **options: Any) -> Tensor:
            if isinstance(attn_mask, CausalBias):
                chosen.append("causal_lower_right")
            else:
                choice = torch._fused_sdp_choice(q, k, v, attn_mask, **options)
                chosen.append(SDPBackend(choice).name)
            return torch.zeros_like(q)

        with mock.patch.object(F, "scaled_dot_product_attention", spy):
            self.attend(query, key, value)
        return chosen


def paths(device: str, prompt: int, fed: Sequence[int]) -> list[AttentionPath]:
    """The paths for one group of a prompt of ``prompt`` tokens and completions that feed ``fed`` tokens each."""
    plan = AttentionPlan.build([(prompt, fed)]).to(device)
    rows = AttentionPlan((group_rows(0, prompt, fed),)).to(device).parts[0]
    dense = AttentionPlan((dense_groups([(prompt, fed)]),)).to(device).parts[0]
    assert isinstance(rows, GroupRows)
    options = {"dropout_p": 0.0, "scale": None}

    def planned(part: Any, grouped: bool = True) -> Attend:
        return lambda q, k, v: part(q, k, v, enable_gqa=grouped, **options)

    def repeated(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        times = q.shape[1] // k.shape[1]
        return planned(rows, grouped=False)(q, *(x.repeat_interleave(times, 1) for x in (k, v)))

    # The rows' mask is a causal one aligned with the last key, which flash attention knows by itself.
    width = rows.index.shape[1]
    aligned = replace(rows, mask=causal_lower_right(width, prompt + width))
    return [
        AttentionPath(f"plan ({type(plan.parts[0]).__name__})", planned(plan.parts[0])),
        AttentionPath("rows", planned(rows)),
        AttentionPath("dense", planned(dense)),
        AttentionPath("rows, keys and values repeated for all heads", repeated),
        AttentionPath("rows, causal_lower_right", planned(aligned)),
        AttentionPath("flex", _when_called(partial(flex, device, prompt, fed)), backward=device == "cuda"),
    ]


def _when_called(make: Callable[[], Attend]) -> Attend:
    made: list[Attend] = []  # so that an error of making it is one of this path alone

    def attend(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        if not made:
            made.append(make())
        return made[0](q, k, v)

    return attend


def flex(device: str, prompt: int, fed: Sequence[int]) -> Attend:
    """FlexAttention over the packed row as it lies: no gathering, no padding, no repeated prompt.

    Its block mask is made once a micro-batch. Compiled on a GPU; on a CPU, where it has no backward, it is not.
    """
    from torch.nn.attention.flex_attention import create_block_mask, flex_attention

    sizes = torch.tensor([prompt, *fed])
    segment = torch.arange(len(sizes)).repeat_interleave(sizes).to(device)

    def sees(batch: Tensor, head: Tensor, query: Tensor, key: Tensor) -> Tensor:
        own, of_key = segment[query], segment[key]
        return (query >= key) & ((own == of_key) | (of_key == 0))

    number = len(segment)
    mask = create_block_mask(sees, None, None, number, number, device=device)
    call = torch.compile(flex_attention, dynamic=False) if device == "cuda" else flex_attention

    def attend(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        q, k, v = (x.transpose(0, 1)[None] for x in (q, k, v))
        return call(q, k, v, block_mask=mask, enable_gqa=True)[0].transpose(0, 1)

    return attend
