"""Supervised warm start: makes the categories reachable before distribution matching begins."""

from __future__ import annotations

from collections import Counter

from torch import Tensor

from lit_madrl.learners.base import PolicyLearner
from lit_madrl.learners.ranks import equally_many
from lit_madrl.learners.rows import Denominators, MicroBatch, Row, merge_rows, micro_batches
from lit_madrl.types import Problem


class SFTLearner(PolicyLearner):
    """Minimizes the mean negative log-likelihood of completion tokens, the stop token included.

    A problem's completions are ``metadata["completions"]``, else its ``reference``. Several completions of one
    prompt share its computation, and identical ones are computed once.
    """

    def training_step(self, batch: list[Problem], batch_idx: int) -> None:
        """One optimizer step on the completions of a batch of problems.

        Raises:
            ValueError: a problem has nothing to learn from.
        """
        rows = merge_rows([row for index, problem in enumerate(batch) for row in self._rows(index, problem)])
        tokens = sum(len(row.ids) * row.copies for row in rows)
        sequences = sum(row.copies for row in rows)
        sequences_all, tokens_all, prompts_all = self.global_sum(sequences, tokens, len(batch))
        batches = micro_batches(
            self.collector.encode_prompts(batch),
            rows,
            "dapo",
            Denominators(sequences_all, tokens_all, max_length=1),
            self.micro_batch_tokens,
            self.device,
        )

        def loss(_: int, batch: MicroBatch) -> Tensor:
            logprobs: Tensor = self.trained_policy(batch.packed)
            return -(batch.weights * logprobs).sum()

        rate = self.learning_rate()
        total, norm = self.optimizer_step_over(equally_many(batches, self.trained_policy), loss)
        self.prompt_cursor += int(prompts_all)
        (total,) = self.global_sum(total)
        numbers = {"loss": total, "grad_norm": norm, "lr": rate, "prompts": float(self.prompt_cursor)}
        self.record(numbers, shown=("loss",))

    def _rows(self, index: int, problem: Problem) -> list[Row]:
        texts = problem.metadata.get("completions") or ([problem.reference] if problem.reference else [])
        if not texts:
            raise ValueError(
                f"problem {problem.id}: expected metadata['completions'] or a reference to learn from, got neither"
            )
        collector = self.collector
        stop = collector.stop_ids(self.sampling)[-1]
        # Equal texts are encoded once: a warm start draws many answers from few options.
        return [
            Row(index, tuple(collector.encode_completion(text, stop)), copies=copies)
            for text, copies in Counter(texts).items()
        ]
