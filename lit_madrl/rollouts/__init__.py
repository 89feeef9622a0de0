"""Engines that turn prompts into sampled completions."""

from lit_madrl.rollouts.base import RolloutEngine
from lit_madrl.rollouts.torch_engine import TorchEngine
from lit_madrl.rollouts.vllm_engine import VLLMEngine
from lit_madrl.rollouts.vllm_server import VLLMServerEngine
from lit_madrl.rollouts.weight_transfer import FileTransfer, WeightTransfer
from lit_madrl.rollouts.weight_transfer_gloo import GlooTransfer
from lit_madrl.rollouts.weight_transfer_nccl import NCCLTransfer

__all__ = [
    "FileTransfer",
    "GlooTransfer",
    "NCCLTransfer",
    "RolloutEngine",
    "TorchEngine",
    "VLLMEngine",
    "VLLMServerEngine",
    "WeightTransfer",
]
