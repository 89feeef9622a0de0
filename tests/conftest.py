from __future__ import annotations

import os
import shutil
from pathlib import Path

import pytest

os.environ.setdefault("OMP_NUM_THREADS", "1")
os.environ.setdefault("HF_HUB_OFFLINE", "1")

import torch
from transformers import AutoTokenizer

from lit_madrl.prepare import write_tiny_chain, write_tiny_choice

torch.set_num_threads(1)


@pytest.fixture(scope="session")
def tiny_choice(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A model folder: a random Qwen3 of one layer and the tokenizer of the choice task."""
    folder = tmp_path_factory.mktemp("models") / "tiny_choice"
    write_tiny_choice(folder, hidden_size=32, layers=1, vocab_size=512)
    return folder


@pytest.fixture(scope="session")
def tiny_chain(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A model folder: a random Qwen3 of one layer and the tokenizer of the chain task."""
    folder = tmp_path_factory.mktemp("models") / "tiny_chain"
    write_tiny_chain(folder, hidden_size=32, layers=1)
    return folder


@pytest.fixture(scope="session")
def chat_model(tiny_choice: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """``tiny_choice`` with a chat template, which some configurations need."""
    folder = tmp_path_factory.mktemp("models") / "chat"
    shutil.copytree(tiny_choice, folder)
    tokenizer = AutoTokenizer.from_pretrained(folder)
    tokenizer.chat_template = "{% for m in messages %}{{ m['content'] }}{% endfor %}\nAnswer:"
    tokenizer.save_pretrained(folder)
    return folder
