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
from transformers import PreTrainedTokenizerFast, Qwen3Config, Qwen3ForCausalLM

from lit_madrl import prepare
from lit_madrl.data import ChoiceDataModule, PromptDataModule
from lit_madrl.data.prompts import seeded
from lit_madrl.tasks import Categorizer, ChoiceCategorizer
from lit_madrl.types import Problem

ROOT = Path(__file__).resolve().parents[1]
WARM_START = ROOT / "runs/quickstart/warm_start/model"
RANDOM_25M = ROOT / "runs/bench/25m"

VOCABULARY = 32_000
SPECIAL = ("<pad>", "<eos>", "<bos>")
WORDS = tuple(f"w{i}" for i in range(VOCABULARY - len(SPECIAL)))


@dataclass(frozen=True)
class Work:
    """P prompts a step and G completions each: of the choice task, or of ``random_words`` words."""

    prompts: int
    group_size: int
    max_new_tokens: int
    random_words: int = 0

    def data(self) -> PromptDataModule:
        """The prompts."""
        if self.random_words:
            return RandomWords(self.random_words, self.prompts)
        return ChoiceDataModule(form="closed", target="uniform", batch_size=self.prompts)

    def categorizer(self) -> Categorizer:
        """What is rewarded."""
        return HashCategorizer() if self.random_words else ChoiceCategorizer()

    def model(self) -> Path:
        """The model folder, made now if it is missing."""
        if self.random_words:
            prepare.write_folder(RANDOM_25M, write_random_model)
            return RANDOM_25M
        if not (WARM_START / "config.json").exists():
            tiny = ["tiny-choice", "--output", "runs/quickstart/tiny", "--vocab-size", "2048"]
            fit = ["fit", "-c", "configs/choice/quickstart_warm_start.yaml"]
            for command in (["-m", "lit_madrl.prepare", *tiny], ["cli.py", *fit]):
                subprocess.run([sys.executable, *command], cwd=ROOT, check=True)
        return WARM_START


PRESETS = {
    "quickstart": Work(16, 32, 8),
    "tiny-8x16": Work(8, 16, 8),
    "25m": Work(8, 16, 32, random_words=64),
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


def write_random_model(folder: Path) -> None:
    """A Qwen3 of 25M parameters with random weights and a tokenizer of 32k words."""
    ids = {word: i for i, word in enumerate((*SPECIAL, *WORDS))}
    tokenizer = Tokenizer(models.WordLevel(ids, unk_token="<pad>"))
    tokenizer.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    config = Qwen3Config(
        vocab_size=VOCABULARY,
        hidden_size=384,
        num_hidden_layers=8,
        num_attention_heads=6,
        num_key_value_heads=2,
        head_dim=64,
        intermediate_size=1024,
        max_position_embeddings=1024,
        tie_word_embeddings=True,
        **{f"{word[1:-1]}_token_id": ids[word] for word in SPECIAL},
    )
    with torch.random.fork_rng(devices=()):
        torch.manual_seed(0)
        model = Qwen3ForCausalLM(config)
    model.save_pretrained(folder)
    names = {f"{word[1:-1]}_token": word for word in SPECIAL}
    PreTrainedTokenizerFast(tokenizer_object=tokenizer, **names).save_pretrained(folder)
