"""Engines that turn prompts into sampled completions."""

from lit_madrl.rollouts.base import RolloutEngine
from lit_madrl.rollouts.torch_engine import TorchEngine

__all__ = ["RolloutEngine", "TorchEngine"]
