"""What the SFT and the GRPO learner share: building, stepping, evaluating, resuming, exporting."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from typing import Any

import lightning as L
import torch
from lightning.pytorch.utilities.types import OptimizerLRScheduler
from torch import Tensor
from torch.optim import Optimizer
from torch.optim.lr_scheduler import LambdaLR

from lit_madrl.learners.collector import Collector, stack_targets
from lit_madrl.learners.evaluation import Evaluation, option_probabilities
from lit_madrl.learners.random_state import hash_seed, random_state, set_random_state
from lit_madrl.learners.ranks import global_sum, of_all_ranks
from lit_madrl.learners.rows import MicroBatch
from lit_madrl.learners.schedule import Schedule
from lit_madrl.policy.build import PolicyConfig, export
from lit_madrl.policy.policy import Policy
from lit_madrl.policy.sharding import clip_gradient, meet, rollout_weights
from lit_madrl.rollouts import TorchEngine
from lit_madrl.rollouts.base import RolloutEngine
from lit_madrl.strategies import FullySharded, check_precision, check_weights
from lit_madrl.tasks.base import Categorizer, Verifier
from lit_madrl.types import Problem, Sampling

OptimizerCallable = Callable[[Iterable[Any]], Optimizer]


def adamw(parameters: Iterable[Any]) -> Optimizer:
    """The default optimizer: AdamW, learning rate 1e-6, betas (0.9, 0.99), weight decay 0.01."""
    return torch.optim.AdamW(parameters, lr=1e-6, betas=(0.9, 0.99), weight_decay=0.01, fused=True)


class PolicyLearner(L.LightningModule):
    """Base of the learners. A batch is a list of problems; optimization is manual.

    Args:
        policy: the model to train.
        optimizer: makes the optimizer from the parameters.
        schedule: learning-rate schedule in optimizer steps.
        sampling: how completions are drawn in training, and in evaluation but for ``eval_sampling``.
        eval_sampling: how completions are drawn in evaluation.
        engine: samples completions; default the embedded :class:`lit_madrl.rollouts.TorchEngine`.
        categorizer: names each completion's category.
        verifier: judges correctness.
        categories: names of the K categories (the data module supplies them).
        max_grad_norm: gradients are scaled down to this norm.
        micro_batch_tokens: packed tokens computed at once; the step's gradient does not depend on it.
        score_truncated: judge completions that the length limit cut.
        export_to: folder that receives the trained model when fitting ends.
        seed: of the sampling streams.
    """

    def __init__(
        self,
        policy: PolicyConfig,
        optimizer: OptimizerCallable = adamw,
        schedule: Schedule = Schedule(),
        sampling: Sampling = Sampling(),
        eval_sampling: Sampling | None = None,
        engine: RolloutEngine | None = None,
        categorizer: Categorizer | None = None,
        verifier: Verifier | None = None,
        categories: Sequence[str] = (),
        max_grad_norm: float = 1.0,
        micro_batch_tokens: int | None = None,
        score_truncated: bool = False,
        export_to: str | None = None,
        seed: int = 0,
    ) -> None:
        super().__init__()
        if max_grad_norm <= 0:
            raise ValueError(f"max_grad_norm: expected a number > 0, got {max_grad_norm}")
        if micro_batch_tokens is not None and micro_batch_tokens < 1:
            raise ValueError(f"micro_batch_tokens: expected an integer >= 1, got {micro_batch_tokens}")
        self.automatic_optimization = False
        self.policy_config = policy
        self.make_optimizer = optimizer
        self.schedule = schedule
        self.sampling = sampling
        self.eval_sampling = eval_sampling or sampling
        self.engine = engine or TorchEngine()
        self.categorizer = categorizer
        self.verifier = verifier
        self.categories = tuple(categories)
        self.max_grad_norm = max_grad_norm
        self.micro_batch_tokens = micro_batch_tokens
        self.score_truncated = score_truncated
        self.export_to = export_to
        self.seed = seed
        self.tokenizer = policy.tokenizer()
        self.policy: Policy | None = None
        self.prompt_cursor = 0
        """Prompts consumed so far by all ranks together: where the data goes on after a resume."""
        self.evaluations = torch.nn.ModuleDict(
            {
                split: Evaluation(self.categories, self.eval_sampling.group_size, verifier is not None)
                for split in ("val", "test")
            }
        )
        self._steps_recorded = 0
        self._rank_states: list[dict[str, Any]] = []

    # building

    def configure_model(self) -> None:
        """Build the policy once a process (Lightning asks before every stage)."""
        if self.policy is None:
            self.policy = self._build()

    def _build(self) -> Policy:
        strategy = getattr(self._trainer, "strategy", None)
        return self.policy_config.build(strategy.sharding if isinstance(strategy, FullySharded) else None)

    @property
    def collector(self) -> Collector:
        """Generates and scores with the current weights."""
        return Collector(
            self.trained_policy,
            self.tokenizer,
            self.engine,
            self.categorizer,
            self.verifier,
            self.score_truncated,
            self.sampling,
            hash_seed(self.seed, self.global_rank, self.prompt_cursor, 2),
            self.global_sum,
        )

    @property
    def trained_policy(self) -> Policy:
        """The policy, once ``configure_model`` has built it."""
        if self.policy is None:
            raise RuntimeError("policy: expected a model built by configure_model, got none yet")
        return self.policy

    def configure_optimizers(self) -> OptimizerLRScheduler:
        """The optimizer over the trainable parameters and its schedule."""
        parameters = [p for p in self.trained_policy.parameters() if p.requires_grad]
        optimizer = self.make_optimizer(parameters)
        total = self.trainer.max_steps  # training prompts never end, so nothing else says how long a run is
        if total < 1 and self.schedule.kind != "constant":
            raise ValueError(
                f"trainer.max_steps: expected a number >= 1, at which schedule {self.schedule.kind!r} ends, got {total}"
            )
        scheduler = LambdaLR(optimizer, lambda step: self.schedule.factor(step, total))
        return {"optimizer": optimizer, "lr_scheduler": scheduler}

    def setup(self, stage: str) -> None:
        """Refuse precisions that change more than they say."""
        check_precision(str(self.trainer.precision))

    def on_fit_start(self) -> None:
        """Refuse, before any work, stop strings that are not one token."""
        for sampling in (self.sampling, self.eval_sampling):
            self.collector.stop_ids(sampling)

    def on_train_start(self) -> None:
        """Give every rank a sampling stream of its own, or all random streams it had when the checkpoint was written.

        Here, since some strategies load checkpoints after ``on_fit_start`` and building the loaders draws numbers.
        """
        if len(self._rank_states) == self.trainer.world_size:
            state = self._rank_states[self.global_rank]
            self.engine.load_state_dict(state["engine"])
            set_random_state(state["random"], self.device)
        else:
            self.engine.seed(hash_seed(self.seed, self.global_rank, self.prompt_cursor))

    # stepping

    def optimizer_step_over(
        self, batches: Sequence[MicroBatch], loss: Callable[[int, MicroBatch], Tensor]
    ) -> tuple[float, float]:
        """One optimizer step on the sum of the losses of ``batches``; returns that sum and the gradient norm.

        ``loss`` must divide by global counts, so that micro-batches and ranks add up to one large batch.

        Raises:
            FloatingPointError: the loss or the gradient is not finite; the weights are still untouched.
        """
        optimizer: Any = self.optimizers()
        optimizer.zero_grad()
        total = torch.zeros((), device=self.device)
        for index, batch in enumerate(batches):
            value = loss(index, batch)
            with optimizer.toggle_model(sync_grad=index == len(batches) - 1):
                # Data-parallel strategies average gradients over ranks; the loss is a share of the global sum.
                self.manual_backward(value * self.trainer.world_size)
            total += value.detach()
        norm = clip_gradient(self.trained_policy, self.max_grad_norm)
        if not (bool(total.isfinite()) and bool(norm.isfinite())):
            raise FloatingPointError(
                f"optimizer step {self.global_step}: expected a finite loss and gradient, got loss {float(total)} and "
                f"gradient norm {float(norm)}; the weights are those of the step before"
            )
        optimizer.step()
        scheduler: Any = self.lr_schedulers()
        scheduler.step()
        return float(total), float(norm)

    def global_sum(self, *values: float) -> list[float]:
        """Each value summed over all ranks."""
        meet(self.trained_policy)
        return list(values) if self.trainer.world_size == 1 else global_sum(values, self.device)

    def learning_rate(self) -> float:
        """The learning rate of the next optimizer step."""
        optimizer: Any = self.optimizers()
        return float(optimizer.param_groups[0]["lr"])

    def record(self, numbers: dict[str, float], shown: Sequence[str]) -> None:
        """Log the numbers of a training step, averaged over ranks, as ``train/…``; the ``shown`` ones on the bar.

        The others go to the loggers directly: twenty calls of ``self.log`` take some 4 ms, which a small model's
        step of 70 ms would notice.
        """
        ranks = self.trainer.world_size
        values = [value / ranks for value in self.global_sum(*numbers.values())]
        named = dict(zip((f"train/{name}" for name in numbers), values, strict=True))
        for name in shown:
            if f"train/{name}" in named:
                self.log(f"train/{name}", named[f"train/{name}"], prog_bar=True, logger=False)
        self._steps_recorded += 1
        if self._steps_recorded % self.trainer.log_every_n_steps == 0:  # type: ignore[attr-defined]
            for logger in self.loggers:
                logger.log_metrics(named, step=self.global_step)

    # evaluating

    def validation_step(self, batch: list[Problem], batch_idx: int) -> None:
        """Sample and measure."""
        self._evaluate("val", batch, batch_idx)

    def test_step(self, batch: list[Problem], batch_idx: int) -> None:
        """Sample and measure."""
        self._evaluate("test", batch, batch_idx)

    def _evaluate(self, split: str, problems: list[Problem], batch_idx: int) -> None:
        with rollout_weights(self.trained_policy):
            if problems:  # else a rank that has run out of prompts
                self._measure(split, problems, batch_idx)

    def _measure(self, split: str, problems: list[Problem], batch_idx: int) -> None:
        # The same seed at every evaluation: curves compare weights, not draws; and training's stream is left alone.
        training_stream = self.engine.state_dict()
        self.engine.seed(hash_seed(self.seed, self.global_rank, batch_idx, 1))
        rollouts = self.collector.generate(problems, self.eval_sampling)
        self.engine.load_state_dict(training_stream)
        scores = self.collector.judge(problems, rollouts)
        evaluation: Any = self.evaluations[split]
        evaluation.update(
            scores,
            stack_targets(problems, self.device, len(self.categories)),
            self.option_probabilities(problems),
        )

    def option_probabilities(self, problems: Sequence[Problem]) -> Tensor | None:
        """Exact probability ``[P, K]`` of each option; None when some problem's options cannot be enumerated."""
        return option_probabilities(self.collector, problems, self.eval_sampling)

    def on_validation_epoch_end(self) -> None:
        """Log the split's numbers."""
        self._log_evaluation("val")

    def on_test_epoch_end(self) -> None:
        """Log the split's numbers."""
        self._log_evaluation("test")

    def _log_evaluation(self, split: str) -> None:
        evaluation: Any = self.evaluations[split]
        # A rank that ran out of prompts takes part in the collectives all the same.
        seen = [count > 0 for count in self.global_sum(*evaluation.seen())]
        numbers = {f"{split}/{name}": value.float() for name, value in evaluation.compute(seen).items()}
        fitting = self.trainer.state.fn == "fit"
        for name, value in numbers.items():
            self.log(
                name,
                value,
                prog_bar=name in (f"{split}/jsd", f"{split}/off_support_rate"),
                logger=not fitting,
            )
        # Lightning would log them at the number of batches; training's numbers are at that of optimizer steps.
        for logger in self.loggers if fitting and not self.trainer.sanity_checking else ():
            logger.log_metrics({name: float(value) for name, value in numbers.items()}, step=self.global_step)

    # resuming and exporting

    def on_save_checkpoint(self, checkpoint: dict[str, Any]) -> None:
        """Add what the weights do not say: the data's place and every rank's random streams."""
        own = {"engine": self.engine.state_dict(), "random": random_state(self.device)}
        checkpoint["lit_madrl"] = {
            "prompt_cursor": self.prompt_cursor,
            "rank_states": of_all_ranks(own, self.trainer.world_size),
            "steps_recorded": self._steps_recorded,
        }

    def on_load_checkpoint(self, checkpoint: dict[str, Any]) -> None:
        """Take up the data and the random streams where the checkpoint left them."""
        if "lit_madrl" not in checkpoint:
            raise ValueError(
                "ckpt_path: expected a checkpoint of a lit_madrl learner, got one of something else"
            )
        if "state_dict" in checkpoint:  # else the strategy has loaded it
            check_weights(self, checkpoint["state_dict"])
        state = checkpoint["lit_madrl"]
        self.prompt_cursor = state["prompt_cursor"]
        self._rank_states = state["rank_states"]
        self._steps_recorded = state["steps_recorded"]

    def on_fit_end(self) -> None:
        """Write the trained model as a transformers folder."""
        if self.export_to is not None and not getattr(self.trainer, "fast_dev_run", False):
            whole = self.policy_config.gathered(self.trained_policy)
            if whole is not None and self.trainer.is_global_zero:
                export(whole, self.tokenizer, self.export_to)
