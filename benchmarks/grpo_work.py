"""What a GRPO benchmark computes: prompts, categories and a model for each preset."""

from __future__ import annotations

import subprocess
import sys
import zlib
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import torch
from tokenizers import Tokenizer, models, pre_tokenizers
from transformers import AutoTokenizer, PreTrainedTokenizerFast, Qwen3ForCausalLM

from benchmarks.shapes import Shape
from lit_madrl import prepare
from lit_madrl.data import ChoiceDataModule, PromptDataModule
from lit_madrl.data.prompts import seeded
from lit_madrl.learners.collector import encode_prompt
from lit_madrl.tasks import Categorizer, ChoiceCategorizer
from lit_madrl.types import Problem

ROOT = Path(__file__).resolve().parents[1]
WARM_START = ROOT / "runs/quickstart/warm_start/model"
SMOLLM2 = ROOT / "runs/models/smollm2"
BENCH = ROOT / "runs/bench"

SPECIAL = ("<pad>", "<eos>", "<bos>")
WORDS = tuple(f"w{i}" for i in range(32_000 - len(SPECIAL)))

RANDOM = {
    "25m": Shape(8, 384, 6, 2, 64, 1024, 32_000, tied=True),
    "wide": Shape(2, 256, 4, 2, 64, 768, 151_936, tied=True),  # Qwen3's vocabulary
}
"""Shapes of models with random weights."""


@dataclass(frozen=True)
class Work:
    """P prompts a step and G completions each.

    Args:
        prompts: P.
        group_size: G.
        max_new_tokens: longest completion; that of a random model hardly ever ends earlier.
        random_words: length of prompts of random words; 0 for the choice task.
        random: which model of ``RANDOM`` completes those.
        few_shot: the choice task of configs/choice/smollm2.yaml with its model, else that of the quick start.
        micro_batches: into which TRL divides its rows; 1 is fastest where memory suffices.
    """

    prompts: int
    group_size: int
    max_new_tokens: int
    random_words: int = 0
    random: str = "25m"
    few_shot: bool = False
    micro_batches: int = 1

    @property
    def stop(self) -> tuple[str, ...]:
        """Strings that end a completion."""
        return ("\n",) if self.few_shot else ()

    def data(self) -> PromptDataModule:
        """The prompts."""
        if self.random_words:
            return RandomWords(self.random_words, self.prompts)
        style = "few_shot" if self.few_shot else "plain"
        return ChoiceDataModule(form="closed", target="uniform", style=style, batch_size=self.prompts)

    def prompt_ids(self, number: int = 1) -> list[list[int]]:
        """The prompts of the first ``number`` steps as token ids."""
        tokenizer = AutoTokenizer.from_pretrained(self.model())
        batches = iter(self.data().train_dataloader())
        return [encode_prompt(tokenizer, p.prompt) for _ in range(number) for p in next(batches)]

    def categorizer(self) -> Categorizer:
        """What is rewarded."""
        return HashCategorizer() if self.random_words else ChoiceCategorizer()

    def model(self) -> Path:
        """The model folder, made now if it is missing.

        Raises:
            FileNotFoundError: it is missing and must be downloaded.
        """
        if self.random_words:
            prepare.write_folder(
                BENCH / self.random, lambda folder: write_random(RANDOM[self.random], folder)
            )
            return BENCH / self.random
        if self.few_shot:
            if not (SMOLLM2 / "config.json").exists():
                command = f"python -m lit_madrl.prepare smollm2 --output {SMOLLM2.relative_to(ROOT)}"
                raise FileNotFoundError(f"expected the model that `{command}` writes, got none")
            return SMOLLM2
        if not (WARM_START / "config.json").exists():
            tiny = ["tiny-choice", "--output", "runs/quickstart/tiny", "--vocab-size", "2048"]
            fit = ["fit", "-c", "configs/choice/quickstart_warm_start.yaml"]
            for command in (["-m", "lit_madrl.prepare", *tiny], ["cli.py", *fit]):
                subprocess.run([sys.executable, *command], cwd=ROOT, check=True)
        return WARM_START


PRESETS = {
    "tiny-8x16": Work(8, 16, 8),
    "quickstart": Work(16, 32, 8),
    "25m-32": Work(8, 16, 32, random_words=64),
    "25m-128": Work(2, 16, 128, random_words=64),
    "25m-512": Work(1, 8, 512, random_words=64),
    "25m-long-prompt": Work(1, 16, 32, random_words=512),
    "smollm2": Work(2, 32, 8, few_shot=True, micro_batches=4),  # TRL would take some 9 GB at once
}


class RandomWords(PromptDataModule):
    """Prompts of random words, for a model with random weights."""

    categories = ("0", "1", "2", "3")
    num_train_prompts = 1 << 16

    def __init__(self, words: int, batch_size: int) -> None:
        super().__init__(batch_size)
        self.words = words

    def train_problem(self, index: int, position: int) -> Problem:
        words = seeded(self.seed, "words", position).choices(WORDS, k=self.words)
        return Problem(str(position), " ".join(words), target=(0.25,) * 4)

    def validation_problems(self) -> list[Problem]:
        return []

    def test_problems(self) -> list[Problem]:
        return []


class HashCategorizer(Categorizer):
    """An arbitrary one of four categories for each text."""

    def __call__(self, problems: Sequence[Problem], completions: Sequence[Sequence[str]]) -> torch.Tensor:
        return torch.tensor([[zlib.crc32(text.encode()) % 4 for text in group] for group in completions])


def write_random(shape: Shape, folder: Path) -> None:
    """A Qwen3 with random weights and a tokenizer of as many words."""
    words = (f"w{i}" for i in range(shape.vocabulary - len(SPECIAL)))
    ids = {word: i for i, word in enumerate((*SPECIAL, *words))}
    tokenizer = Tokenizer(models.WordLevel(ids, unk_token="<pad>"))
    tokenizer.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    with torch.random.fork_rng(devices=()):
        torch.manual_seed(0)
        model = Qwen3ForCausalLM(shape.config(max_position_embeddings=1024))
    model.save_pretrained(folder)
    names = {f"{word[1:-1]}_token": word for word in SPECIAL}
    PreTrainedTokenizerFast(tokenizer_object=tokenizer, **names).save_pretrained(folder)
