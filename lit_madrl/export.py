"""``python cli.py export --ckpt_path CHECKPOINT --output FOLDER``: a checkpoint as a folder of transformers."""

from __future__ import annotations

import argparse
import pickle
import warnings
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
import yaml
from torch import Tensor
from torch.distributed.checkpoint.filesystem import FileSystemReader
from torch.distributed.checkpoint.metadata import TensorStorageMetadata
from torch.distributed.checkpoint.state_dict_loader import load

from lit_madrl.policy import PolicyConfig, export

_LEARNER = "policy."  # the learner's name for its policy
_SHARDED = "state_dict."  # and Lightning's for the weights in a sharded checkpoint


def main(arguments: Sequence[str]) -> None:
    """Run the subcommand.

    Raises:
        ValueError: the checkpoint or the configuration is missing or does not fit the other.
    """
    parser = argparse.ArgumentParser(
        "cli.py export",
        description="Write the model of a checkpoint as a transformers folder, adapters merged.",
    )
    parser.add_argument(
        "--ckpt_path", type=Path, required=True, help="file, or folder of a sharded checkpoint"
    )
    parser.add_argument("--output", type=Path, required=True, help="folder to write")
    parser.add_argument(
        "-c", "--config", type=Path, help="configuration of the run; default: config.yaml of its run folder"
    )
    options = parser.parse_args(arguments)
    export_checkpoint(options.ckpt_path, options.output, options.config)
    print(f"{options.output}: written")


def export_checkpoint(ckpt_path: Path, output: Path, config: Path | None = None) -> None:
    """Write the policy of a checkpoint of any strategy, and its tokenizer, as ``from_pretrained`` reads them.

    Args:
        ckpt_path: a file, or the folder of a sharded checkpoint; no process group is needed.
        output: folder to write.
        config: configuration of the run; default ``config.yaml`` above or beside ``ckpt_path``.

    Raises:
        ValueError: the checkpoint or the configuration is missing or does not fit the other.
    """
    if output.is_file():
        raise ValueError(f"output: expected a folder, got the file {str(output)!r}")
    weights = policy_weights(ckpt_path)
    policy_config = _policy_config(config or _run_config(ckpt_path))
    export(policy_config.restore(weights), policy_config.tokenizer(), output)


def policy_weights(ckpt_path: Path) -> dict[str, Tensor]:
    """The policy's state dict in a checkpoint; of a sharded one nothing else is read.

    Raises:
        ValueError: there is no checkpoint, or none of a learner of this package.
    """
    if (ckpt_path / ".metadata").is_file():
        weights = _sharded_weights(ckpt_path)
    elif ckpt_path.is_file():
        try:
            content = torch.load(ckpt_path, map_location="cpu", mmap=True, weights_only=True)
        except (RuntimeError, EOFError, pickle.UnpicklingError) as error:
            raise ValueError(f"ckpt_path: expected a checkpoint, got {str(ckpt_path)!r}: {error}") from error
        weights = content.get("state_dict", {})
    else:
        raise ValueError(f"ckpt_path: expected a checkpoint, got {str(ckpt_path)!r}, which is none")
    policy = {name.removeprefix(_LEARNER): w for name, w in weights.items() if name.startswith(_LEARNER)}
    if not policy:
        raise ValueError(
            f"ckpt_path: expected a checkpoint of a learner, got {str(ckpt_path)!r} without a policy"
        )
    return policy


def _sharded_weights(folder: Path) -> dict[str, Tensor]:
    reader = FileSystemReader(folder)
    weights: dict[str, Any] = {
        name: torch.empty(entry.size, dtype=entry.properties.dtype)
        for name, entry in reader.read_metadata().state_dict_metadata.items()
        if isinstance(entry, TensorStorageMetadata) and name.startswith(_SHARDED + _LEARNER)
    }
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", message=".*assuming the intent is to load in a single process")
        load(weights, storage_reader=reader, no_dist=True)
    return {name.removeprefix(_SHARDED): weight for name, weight in weights.items()}


def _run_config(ckpt_path: Path) -> Path:
    places = [folder / "config.yaml" for folder in (ckpt_path.parent.parent, ckpt_path.parent)]
    found = next((place for place in places if place.is_file()), None)
    if found is None:
        raise ValueError(f"config: expected -c with the run's configuration, as {places[0]} does not exist")
    return found


def _policy_config(path: Path) -> PolicyConfig:
    if not path.is_file():
        raise ValueError(f"config: expected a YAML file, got {str(path)!r}, which does not exist")
    try:
        return PolicyConfig(**yaml.safe_load(path.read_text())["model"]["init_args"]["policy"])
    except (KeyError, TypeError, yaml.YAMLError) as error:
        raise ValueError(f"config: expected model.init_args.policy in {path}, got {error!r}") from error
