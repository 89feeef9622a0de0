"""A table of what the policy wrote, and what became of it."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import lightning as L
import pyarrow as pa
import pyarrow.parquet as pq

from lit_madrl.learners import Experience, GRPOLearner
from lit_madrl.types import Source


class CompletionTable(L.Callback):
    """Writes ``completions/step_N.parquet``: one row a rollout, for every ``every_n_steps``-th batch of rollouts.

    Columns: step, problem, prompt, completion, category (null off-support), correct, reward, advantage, length,
    finished, on_policy, source, prefix_length (tokens that were given).

    Args:
        every_n_steps: optimizer steps between two tables.
        max_prompts: prompts a table, all their rollouts with them.
        folder: default ``completions`` in the run folder.
    """

    def __init__(self, every_n_steps: int = 10, max_prompts: int = 8, folder: str | None = None) -> None:
        for name, value in (("every_n_steps", every_n_steps), ("max_prompts", max_prompts)):
            if value < 1:
                raise ValueError(f"{name}: expected an integer >= 1, got {value}")
        self.every_n_steps = every_n_steps
        self.max_prompts = max_prompts
        self.folder = folder

    def setup(self, trainer: L.Trainer, pl_module: L.LightningModule, stage: str) -> None:
        """Settle the folder on all ranks: ``trainer.log_dir`` is a collective that one rank alone waits in forever."""
        self.folder = self.folder or str(Path(trainer.log_dir or trainer.default_root_dir) / "completions")

    def on_train_batch_end(
        self, trainer: L.Trainer, pl_module: L.LightningModule, outputs: Any, batch: Any, batch_idx: int
    ) -> None:
        """Write the table of this batch if it is one of those to keep."""
        if (
            not isinstance(pl_module, GRPOLearner)
            or pl_module.experience is None
            or not trainer.is_global_zero
        ):
            return
        if (batch_idx + 1) % self.every_n_steps:
            return
        folder = Path(self.folder or "completions")
        folder.mkdir(parents=True, exist_ok=True)
        table = completion_table(
            pl_module.experience, pl_module.categories, trainer.global_step, self.max_prompts
        )
        pq.write_table(table, folder / f"step_{trainer.global_step:06d}.parquet")


def completion_table(
    experience: Experience, categories: tuple[str, ...], step: int, max_prompts: int
) -> pa.Table:
    """One row a rollout of the first ``max_prompts`` prompts."""
    scores, lengths = experience.scores, experience.rollouts.lengths
    source = experience.rollouts.source
    columns: dict[str, list[Any]] = {}
    for p, problem in enumerate(experience.problems[:max_prompts]):
        for g, text in enumerate(experience.texts[p]):
            category = int(scores.category[p, g])
            row = {
                "step": step,
                "problem": problem.id,
                "prompt": problem.prompt
                if isinstance(problem.prompt, str)
                else problem.prompt[-1]["content"],
                "completion": text,
                "category": None if category < 0 else categories[category] if categories else str(category),
                "correct": float(scores.correct[p, g]),
                "reward": float(experience.rewards[p, g]),
                "advantage": float(experience.advantages[p, g]),
                "length": int(lengths[p, g]),
                "finished": bool(experience.rollouts.finished[p, g]),
                "on_policy": bool(scores.on_policy[p, g]),
                "source": Source(0 if source is None else int(source[p, g])).name.lower(),
                "prefix_length": int(experience.rollouts.prefix_lengths[p, g]),
            }
            for name, value in row.items():
                columns.setdefault(name, []).append(value)
    schema = pa.schema([("category", pa.string())])
    table = pa.table({name: values for name, values in columns.items() if name != "category"})
    return table.append_column(schema.field(0), pa.array(columns["category"], pa.string()))
