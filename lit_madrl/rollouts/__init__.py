"""Engines that turn prompts into sampled completions."""

from lit_madrl.rollouts.base import RolloutEngine
from lit_madrl.rollouts.torch_engine import TorchEngine
from lit_madrl.rollouts.vllm_engine import VLLMEngine
from lit_madrl.rollouts.vllm_server import VLLMServerEngine

__all__ = ["RolloutEngine", "TorchEngine", "VLLMEngine", "VLLMServerEngine"]
