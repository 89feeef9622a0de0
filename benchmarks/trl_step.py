"""One step of TRL's GRPOTrainer on given token ids, by stages."""

from __future__ import annotations

import tempfile
import time
from collections.abc import Sequence
from typing import Any

import torch


def seconds_of_a_step(
    model: Any, prompts: Sequence[Sequence[int]], group: int, completion: int, checkpointing: bool
) -> dict[str, float]:
    """Seconds of the last of ``len(prompts)`` steps, a prompt each: ``generation``, and ``update`` after it.

    Without a reference (beta = 0) and logs, the whole group at once.
    """
    from datasets import Dataset
    from tokenizers import Tokenizer, models, pre_tokenizers
    from transformers import PreTrainedTokenizerFast, PrinterCallback, TrainerCallback
    from trl import GRPOTrainer

    device = next(model.parameters()).device.type
    used = {f"t{i}": i for i in sorted({0, 1, 2}.union(*map(set, prompts)))}
    words = Tokenizer(models.WordLevel(used, unk_token="t0"))
    words.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    names = {"pad_token": "t0", "eos_token": "t1", "bos_token": "t2"}
    seconds: dict[str, float] = {}

    def now() -> float:
        if device == "cuda":
            torch.cuda.synchronize()
        return time.perf_counter()

    class Clock(TrainerCallback):
        def on_step_begin(self, *_: Any, **__: Any) -> None:
            self.begun = now()

        def on_step_end(self, *_: Any, **__: Any) -> None:
            seconds["update"] = now() - max(self.begun, seconds["prepared"])

    with tempfile.TemporaryDirectory() as folder:
        trainer = GRPOTrainer(
            model=model,
            processing_class=PreTrainedTokenizerFast(tokenizer_object=words, **names),
            reward_funcs=lambda completion_ids, **_: [float(ids[0] % 2) for ids in completion_ids],
            train_dataset=Dataset.from_dict({"prompt": [" ".join(f"t{i}" for i in ids) for ids in prompts]}),
            callbacks=[Clock()],
            args=arguments(folder, device, len(prompts), group, completion, checkpointing),
        )
        trainer.remove_callback(PrinterCallback)
        generate, prepare = trainer._generate_single_turn, trainer._prepare_inputs

        def timed_generate(*args: Any, **kwargs: Any) -> Any:
            begun = now()
            made = generate(*args, **kwargs)
            seconds["generation"] = now() - begun
            return made

        def timed_prepare(*args: Any, **kwargs: Any) -> Any:
            inputs = prepare(*args, **kwargs)
            seconds["prepared"] = now()
            return inputs

        trainer._generate_single_turn, trainer._prepare_inputs = timed_generate, timed_prepare
        trainer.train()
    return {stage: seconds[stage] for stage in ("generation", "update")}


def arguments(folder: str, device: str, steps: int, group: int, completion: int, checkpointing: bool) -> Any:
    """TRL's settings."""
    from trl import GRPOConfig

    return GRPOConfig(
        output_dir=folder,
        use_cpu=device == "cpu",
        bf16=True,
        per_device_train_batch_size=group,
        num_generations=group,
        max_completion_length=completion,
        max_steps=steps,
        learning_rate=1e-6,
        beta=0.0,
        gradient_checkpointing=checkpointing,
        report_to="none",
        logging_strategy="no",
        save_strategy="no",
        disable_tqdm=True,
    )
