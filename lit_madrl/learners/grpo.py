"""GRPO whose rewards see whole groups: prompts -> rollouts -> scores -> rewards -> advantages -> loss."""

from __future__ import annotations

import time
import warnings
from contextlib import nullcontext
from typing import Any, Literal, cast

import torch
from torch import Tensor

from lit_madrl.augmenters.base import RolloutAugmenter
from lit_madrl.functional import (
    clip_fraction,
    clipped_surrogate,
    group_advantages,
    kl_estimate,
)
from lit_madrl.learners.ahead import RolloutsAhead
from lit_madrl.learners.base import PolicyLearner
from lit_madrl.learners.collector import Collector, stack_targets
from lit_madrl.learners.experience import Experience, Origin, newly_inserted
from lit_madrl.learners.mismatch import Mismatch
from lit_madrl.learners.objective import Objective
from lit_madrl.learners.ranks import bit_sums, equally_many
from lit_madrl.learners.rows import Denominators, MicroBatch, Row, micro_batches
from lit_madrl.policy.build import adapters_disabled
from lit_madrl.policy.policy import Policy
from lit_madrl.policy.sharding import frozen, rollout_weights
from lit_madrl.rewards.base import RewardShaper
from lit_madrl.types import Problem, Rollouts


class GRPOLearner(PolicyLearner):
    """Trains a policy by GRPO with a group reward.

    Args:
        rewards: turns the scores of a group into rewards.
        objective: the loss.
        augmenters: change the rollouts before they are rewarded, in this order.
        rollouts_ahead: 1 samples each batch while the policy is trained on the one before, so from the weights of one
            update ago; for engines that can, and with ``objective.importance``. 0 samples with the present weights.
        kwargs: see :class:`PolicyLearner`.
    """

    def __init__(
        self,
        rewards: RewardShaper,
        objective: Objective = Objective(),
        augmenters: list[RolloutAugmenter] | None = None,
        rollouts_ahead: Literal[0, 1] = 0,
        **kwargs: Any,
    ) -> None:
        super().__init__(**kwargs)
        if self.sampling.temperature == 0:
            raise ValueError("sampling.temperature: expected a number > 0 for training, got 0")
        if rollouts_ahead not in (0, 1):
            raise ValueError(f"rollouts_ahead: expected 0 or 1, got {rollouts_ahead!r}")
        if rollouts_ahead and objective.importance is None:
            raise ValueError("objective.importance: expected one with rollouts_ahead = 1, got none")
        if objective.importance is not None and not self.engine.reports_logprobs:
            raise ValueError(
                f"objective.importance: expected an engine that reports the sampler's log-probabilities, got "
                f"{type(self.engine).__name__}"
            )
        self.rewards = rewards
        self.objective = objective
        self.augmenters = torch.nn.ModuleList(augmenters or [])
        self.ahead = RolloutsAhead(self.engine, augmenters or []) if rollouts_ahead else None
        self.experience: Experience | None = None
        # In a list, so that it is neither trained nor saved with the module.
        self._reference: list[Policy] = []

    def configure_model(self) -> None:
        """Build the policy and its frozen reference."""
        super().configure_model()
        if self.objective.beta > 0 and self.policy_config.lora is None and not self._reference:
            self._reference.append(frozen(self._build()))

    def on_fit_start(self) -> None:
        """Place the reference and complain, before any work, about settings that cannot learn the target."""
        super().on_fit_start()
        if self.ahead is not None:
            self.ahead.restart()
        for reference in self._reference:
            if reference.sharding is None:
                reference.to(self.device)
        if self.sampling.truncates:
            warnings.warn(
                "sampling: top_k, top_p, min_new_tokens or temperature 0 draw from another distribution than the one "
                "whose likelihood is trained, so the policy gradient is biased",
                stacklevel=2,
            )

    def on_save_checkpoint(self, checkpoint: dict[str, Any]) -> None:
        """Add which reference the policy is held to."""
        with self.ahead.undone() if self.ahead is not None else nullcontext():
            super().on_save_checkpoint(checkpoint)
        checkpoint["lit_madrl"]["reference"] = bit_sums(self._reference)

    def on_load_checkpoint(self, checkpoint: dict[str, Any]) -> None:
        """Take up the run.

        Raises:
            ValueError: ``policy.pretrained`` now gives another reference than the run began with.
        """
        super().on_load_checkpoint(checkpoint)
        begun_with = checkpoint["lit_madrl"].get("reference", [])
        if self._reference and begun_with and begun_with != bit_sums(self._reference):
            raise ValueError(
                f"policy.pretrained: expected the weights this run began with as the frozen reference, got others from "
                f"{self.policy_config.pretrained!r}"
            )

    def training_step(self, batch: list[Problem], batch_idx: int) -> None:
        """Collect a batch of rollouts and make ``inner_epochs`` optimizer steps on it."""
        begun = time.perf_counter()
        try:
            with rollout_weights(self.trained_policy):
                experience = self.collect(batch)
                self._begin_next(batch)
        except (ValueError, RuntimeError) as error:
            error.add_note(f"while rollouts were collected for optimizer step {self.global_step}")
            raise
        collected = time.perf_counter()
        rate = self.learning_rate()
        numbers = self.learn(experience)
        (prompts,) = self.global_sum(len(batch))
        self.prompt_cursor += int(prompts)
        self.experience = experience
        numbers |= {
            "lr": rate,
            "prompts": float(self.prompt_cursor),
            "seconds/rollout": collected - begun,
            "seconds/update": time.perf_counter() - collected,
        }
        if self.ahead is not None:
            numbers["staleness"] = float(experience.staleness)
        numbers |= experience.describe(self.categories, self.verifier is not None, self.global_sum)
        numbers |= self.verifier.numbers() if self.verifier else {}
        for augmenter in self.augmenters:
            numbers |= cast(RolloutAugmenter, augmenter).numbers()
        self.record(numbers, shown=("reward", "jsd", "off_support_rate"))

    def collect(self, problems: list[Problem]) -> Experience:
        """Sample, score and reward a group of completions of each problem."""
        collector = self.collector
        targets = stack_targets(problems, self.device, len(self.categories))
        if self.prompt_cursor == 0:
            self._warn_about(targets)
        sampled, staleness = self._sampled(problems, collector)
        rollouts = sampled
        texts = collector.decode(rollouts)
        scores = sampled_scores = collector.score(problems, rollouts, texts)
        origin = Origin.sampled(rollouts)
        for index, augmenter in enumerate(self.augmenters):
            before = rollouts, scores
            rollouts, scores = augmenter(problems, rollouts, scores, collector)
            inserted = newly_inserted(before, (rollouts, scores))
            origin = origin.after(index, cast(RolloutAugmenter, augmenter), inserted, rollouts)
        if rollouts is not sampled:
            texts = collector.decode(rollouts)
        rewards = self.rewards(scores, targets)
        advantages = group_advantages(rewards, self.objective.advantage_scale, baseline=origin.in_baseline)
        return Experience(
            problems,
            rollouts,
            texts,
            scores,
            sampled_scores,
            origin,
            targets,
            rewards,
            advantages,
            collector.generated_tokens,
            staleness,
        )

    def _sampled(self, problems: list[Problem], collector: Collector) -> tuple[Rollouts, int]:
        """Rollouts of the problems, and how many optimizer steps ago the policy was what sampled them."""
        pending = None if self.ahead is None else self.ahead.take(problems, collector)
        if pending is not None:
            return pending[0], self.global_step - pending[1]
        return collector.generate(problems, self.sampling, self._prefixes(problems, collector)), 0

    def _begin_next(self, batch: list[Problem]) -> None:
        """Begin to sample the next batch, if there will be one."""
        last = 0 <= self.trainer.max_steps <= self.global_step + self.objective.inner_epochs
        if self.ahead is not None and not last:
            loader: Any = self.trainer.train_dataloader
            self.ahead.begin(batch, loader, self.collector, self.global_step)

    def on_validation_start(self) -> None:
        """Let all ranks finish the batch that is being sampled: evaluation may bring new weights to shared servers."""
        if self.ahead is not None and self.ahead.settle():
            self.global_sum(0.0)

    def _prefixes(self, problems: list[Problem], collector: Collector) -> list[list[list[int]]] | None:
        """What all rollouts of a problem begin with, if an augmenter says so."""
        wanted = [
            cast(RolloutAugmenter, augmenter).prefixes(problems, collector) for augmenter in self.augmenters
        ]
        given = [prefixes for prefixes in wanted if prefixes is not None]
        if len(given) > 1:
            raise ValueError(f"augmenters: expected at most one that begins rollouts, got {len(given)}")
        return [[list(prefix)] * self.sampling.group_size for prefix in given[0]] if given else None

    def _warn_about(self, targets: Tensor) -> None:
        complaints = {
            complaint
            for target in (torch.unique(targets, dim=0) if targets.numel() else targets[:1])
            for complaint in self.rewards.warnings(target, self.sampling.group_size)
        }
        for complaint in sorted(complaints):
            warnings.warn(complaint, stacklevel=2)

    def learn(self, experience: Experience) -> dict[str, float]:
        """Update the policy on a batch of rollouts; returns what is worth logging."""
        objective = self.objective
        batches = equally_many(self._micro_batches(experience), self.trained_policy)
        reference = [self._reference_logprobs(batch) for batch in batches]
        old: list[Tensor | None] = [None] * len(batches)
        mismatch = Mismatch(objective.importance)
        weights = [batch.weights for batch in batches]
        # Numerators and denominators: their ratios depend neither on micro-batches nor on ranks.
        sums: dict[str, Tensor] = {}

        def add(name: str, value: Tensor) -> None:
            sums[name] = sums[name] + value if name in sums else value

        def loss(index: int, batch: MicroBatch) -> Tensor:
            logprobs = self.trained_policy(batch.packed, self.sampling.temperature)
            before = old[index]
            if before is None:  # the first epoch is on-policy: no separate pass for the old logprobs
                before = old[index] = logprobs.detach()
                weights[index] = mismatch.corrected(batch, before)
            clip = (objective.clip_low, objective.clip_high)
            token_loss = clipped_surrogate(logprobs, before, batch.advantages, *clip)
            token_loss = self._with_inserted(token_loss, logprobs, batch)
            own = (batch.augmenter < 0) & (batch.weights > 0)
            share = clip_fraction(logprobs[own], before[own], batch.advantages[own], *clip)
            add("clipped", share * own.sum())
            add("tokens", own.sum())
            ref = reference[index]
            if ref is not None:
                kl = kl_estimate(logprobs, ref, objective.kl)
                add("kl", (batch.weights * kl.detach()).sum())
                add("weight", batch.weights.sum())
                token_loss = token_loss + objective.beta * kl
            return (weights[index] * token_loss).sum()

        for _ in range(objective.inner_epochs):
            sums.clear()
            total, norm = self.optimizer_step_over(batches, loss)
        total, *values = self.global_sum(total, *map(float, sums.values()))
        summed = dict(zip(sums, values, strict=True))
        numbers = {
            "loss": total,
            "grad_norm": norm,
            "clip_fraction": summed["clipped"] / max(summed["tokens"], 1),
        }
        if "kl" in summed:
            numbers["kl"] = summed["kl"] / summed["weight"] if summed["weight"] else 0.0
        return numbers | mismatch.numbers(self.global_sum, self._global_max)

    def _global_max(self, value: float) -> float:
        """The largest value of all ranks."""
        ranks = range(self.trainer.world_size)
        return max(self.global_sum(*(value if rank == self.global_rank else 0.0 for rank in ranks)))

    def _with_inserted(self, token_loss: Tensor, logprobs: Tensor, batch: MicroBatch) -> Tensor:
        """The loss of inserted rows is what their augmenter says."""
        for index, augmenter in enumerate(self.augmenters):
            rows = batch.augmenter == index
            if bool(rows.any()):
                loss = cast(RolloutAugmenter, augmenter).inserted_loss(
                    logprobs[rows], batch.advantages[rows], batch.given[rows]
                )
                token_loss = token_loss.masked_scatter(rows, loss)
        return token_loss

    def _micro_batches(self, experience: Experience) -> list[MicroBatch]:
        objective, rollouts = self.objective, experience.rollouts
        counted = experience.counted(objective.dead_groups)
        lengths = (rollouts.lengths - experience.origin.context)[counted]
        sequences, tokens = self.global_sum(lengths.numel(), int(lengths.sum()))
        # Without a KL term a dead group has no gradient: it counts, but is not computed.
        rows = experience.rows(counted if objective.beta > 0 else counted & ~experience.dead)
        if not rows:  # nothing to learn here: one row of weight 0 keeps the optimizer and the ranks in step
            rows = [Row(0, tuple(rollouts.completions()[0][0]), copies=0)]
        longest = objective.max_length or self.sampling.max_new_tokens
        return micro_batches(
            rollouts.prompt_ids,
            rows,
            objective.reduction,
            Denominators(max(sequences, 1), max(tokens, 1), longest),
            self.micro_batch_tokens,
            self.device,
            rollouts.sampler_logprobs.flatten(0, 1).cpu() if self.engine.reports_logprobs else None,
        )

    @torch.no_grad()
    def _reference_logprobs(self, batch: MicroBatch) -> Tensor | None:
        if self.objective.beta == 0:
            return None
        if self._reference:
            return self._reference[0](batch.packed, self.sampling.temperature)  # type: ignore[no-any-return]
        with adapters_disabled(self.trained_policy) as reference:
            return reference(batch.packed, self.sampling.temperature)  # type: ignore[no-any-return]
