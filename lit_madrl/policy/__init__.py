"""The policy: packed batches, shared-prefix attention, building and exporting."""

from lit_madrl.policy.build import PolicyConfig, export
from lit_madrl.policy.packing import PackedBatch, pack
from lit_madrl.policy.policy import Policy

__all__ = ["PackedBatch", "Policy", "PolicyConfig", "export", "pack"]
