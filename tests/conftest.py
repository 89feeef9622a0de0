from __future__ import annotations

import os
from pathlib import Path

import pytest

os.environ.setdefault("OMP_NUM_THREADS", "1")
os.environ.setdefault("HF_HUB_OFFLINE", "1")

import torch

from lit_madrl.prepare import write_tiny_choice

torch.set_num_threads(1)


@pytest.fixture(scope="session")
def tiny_choice(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A model folder: a random Qwen3 of one layer and the tokenizer of the choice task."""
    folder = tmp_path_factory.mktemp("models") / "tiny_choice"
    write_tiny_choice(folder, hidden_size=32, layers=1, vocab_size=512)
    return folder
