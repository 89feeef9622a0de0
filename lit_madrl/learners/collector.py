"""From problems to scored rollouts: the one place where text and tokens meet."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch
from torch import Tensor
from transformers import PreTrainedTokenizerBase

from lit_madrl.augmenters.base import Reference
from lit_madrl.functional import validate_target
from lit_madrl.policy.packing import pack
from lit_madrl.policy.policy import Policy
from lit_madrl.rollouts.base import RolloutEngine
from lit_madrl.tasks.base import Categorizer, Verifier
from lit_madrl.types import Problem, Rollouts, Sampling, Scores


class Collector:
    """Generates and scores completions with the current policy.

    Args:
        policy: the policy being trained.
        tokenizer: the policy's own.
        engine: samples completions.
        categorizer: names each completion's category; without one every category is -1.
        verifier: judges correctness; without one every completion has correctness 0.
        score_truncated: judge completions that the length limit cut. By default those are off-support and
            incorrect: the text so far may only begin like an answer.
        sampling: how training draws completions; an augmenter continues in the same way.
        seed: of :meth:`generator`; the learner gives another one on every rank and at every step.
        global_sum: sums over ranks.
    """

    def __init__(
        self,
        policy: Policy,
        tokenizer: PreTrainedTokenizerBase,
        engine: RolloutEngine,
        categorizer: Categorizer | None = None,
        verifier: Verifier | None = None,
        score_truncated: bool = False,
        sampling: Sampling = Sampling(),
        seed: int = 0,
        global_sum: Callable[..., list[float]] = lambda *values: list(values),
    ) -> None:
        self.policy = policy
        self.tokenizer = tokenizer
        self.engine = engine
        self.categorizer = categorizer
        self.verifier = verifier
        self.score_truncated = score_truncated
        self.sampling = sampling
        self.seed = seed
        self.global_sum = global_sum
        self.generated_tokens = 0
        """Tokens sampled so far through this collector; given prefixes are none."""

    def generator(self) -> torch.Generator:
        """Random numbers of this rank and step: a pure function of them, so that a resumed run draws the same."""
        return torch.Generator().manual_seed(self.seed)

    def stop_ids(self, sampling: Sampling) -> list[int]:
        """The end-of-sequence token and every ``sampling.stop`` string as token ids.

        Raises:
            ValueError: a stop string is not exactly one token, or there is nothing to stop at.
        """
        ids = [] if self.tokenizer.eos_token_id is None else [int(self.tokenizer.eos_token_id)]
        for text in sampling.stop:
            tokens = self.tokenizer.encode(text, add_special_tokens=False)
            if len(tokens) != 1:
                raise ValueError(
                    f"sampling.stop: expected strings of one token, got {text!r} with {len(tokens)}"
                )
            ids.append(tokens[0])
        if not ids:
            raise ValueError(
                "sampling.stop: expected at least one string, as the tokenizer has no end-of-sequence token"
            )
        return ids

    def encode_prompts(self, problems: Sequence[Problem]) -> list[list[int]]:
        """Prompt tokens; chat messages go through the tokenizer's chat template."""
        return [encode_prompt(self.tokenizer, problem.prompt) for problem in problems]

    def encode_completion(self, text: str, stop_id: int) -> list[int]:
        """Tokens of a completion text with its stop token."""
        return [*self.tokenizer.encode(text, add_special_tokens=False), stop_id]

    def encode_reference(self, problem: Problem) -> Reference | None:
        """The problem's reference with the characters of each token; None when it has none."""
        if not problem.reference:
            return None
        encoded = self.tokenizer(problem.reference, add_special_tokens=False, return_offsets_mapping=True)
        stop = self.stop_ids(self.sampling)[-1]
        return Reference(problem.reference, [*encoded["input_ids"], stop], list(encoded["offset_mapping"]))

    def generate(
        self,
        problems: Sequence[Problem],
        sampling: Sampling,
        prefixes: Sequence[Sequence[Sequence[int]]] | None = None,
    ) -> Rollouts:
        """Sample a group of completions of each problem with the current weights; they begin with ``prefixes``."""
        self.engine.sync_weights(self.policy.model)
        rollouts = self.engine.generate(
            self.encode_prompts(problems), sampling, self.stop_ids(sampling), prefixes=prefixes
        )
        self.generated_tokens += int((rollouts.lengths - rollouts.prefix_lengths).sum())
        return rollouts

    def judge(self, problems: Sequence[Problem], rollouts: Rollouts) -> Scores:
        """Decode and score completions."""
        return self.score(problems, rollouts, self.decode(rollouts))

    def decode(self, rollouts: Rollouts) -> list[list[str]]:
        """Texts of the completions, without stop token and special tokens; equal completions decode once."""
        finished = rollouts.finished.tolist()
        keys = [
            [tuple(ids[:-1] if done else ids) for ids, done in zip(group, group_finished, strict=True)]
            for group, group_finished in zip(rollouts.completions(), finished, strict=True)
        ]
        distinct = list({key for group in keys for key in group})
        texts = self.tokenizer.batch_decode([list(key) for key in distinct], skip_special_tokens=True)
        text_of = dict(zip(distinct, texts, strict=True))
        return [[text_of[key] for key in group] for group in keys]

    def score(self, problems: Sequence[Problem], rollouts: Rollouts, texts: list[list[str]]) -> Scores:
        """Category, correctness and format of each completion.

        Raises:
            ValueError: a categorizer or verifier returned the wrong shape or a value that is no number.
        """
        shape = rollouts.finished.shape
        category = torch.full(shape, -1)
        if self.categorizer is not None:
            category = _checked("categorizer", self.categorizer(problems, texts), shape).long()
        correct = format = torch.zeros(shape)
        if self.verifier is not None:
            correct = _checked("verifier", self.verifier(problems, texts), shape).float()
            format = _checked(
                "verifier.well_formed", self.verifier.well_formed(problems, texts), shape
            ).float()
        if not self.score_truncated:
            finished = rollouts.finished.cpu()
            category = category.where(finished, -1)
            correct, format = correct * finished, format * finished
        return Scores.build(category, correct, format).to(rollouts.finished.device)

    def logprobs(
        self, prompts: Sequence[Sequence[int]], groups: Sequence[Sequence[Sequence[int]]]
    ) -> tuple[Tensor, Tensor]:
        """Log-probabilities of given completions under the current policy at temperature 1.

        Returns:
            ``[R, T]`` nats, zero after each completion's end, for all completions group after group; and the
            completions' total log-probabilities ``[R]``.
        """
        device = next(self.policy.parameters()).device
        packed = pack(prompts, groups).to(device)
        with torch.no_grad():
            values = self.policy(packed)
        return packed.unpack(values), packed.row_sums(values)


def encode_prompt(tokenizer: PreTrainedTokenizerBase, prompt: str | Sequence[dict[str, str]]) -> list[int]:
    """Tokens of a prompt; chat messages go through the tokenizer's chat template, without thinking."""
    if isinstance(prompt, str):
        return list(tokenizer.encode(prompt))
    return list(
        tokenizer.apply_chat_template(
            list(prompt), add_generation_prompt=True, enable_thinking=False, return_dict=False
        )
    )


def _checked(name: str, values: Tensor, shape: torch.Size) -> Tensor:
    if not isinstance(values, Tensor) or values.shape != shape:
        got = tuple(values.shape) if isinstance(values, Tensor) else type(values).__name__
        raise ValueError(f"{name}: expected a tensor of shape {tuple(shape)}, got {got}")
    if values.is_floating_point() and not bool(values.isfinite().all()):
        raise ValueError(
            f"{name}: expected finite numbers, got {int((~values.isfinite()).sum())} that are not"
        )
    return values.cpu()


def stack_targets(
    problems: Sequence[Problem], device: torch.device | str = "cpu", num_categories: int = 0
) -> Tensor:
    """Targets ``[P, K]`` of problems; K is 0 when the task has no categories.

    Args:
        problems: P problems.
        device: where the targets are wanted.
        num_categories: K; 0 takes the targets' own length.

    Raises:
        ValueError: problems of one batch have targets of different lengths, or a target is no distribution.
    """
    lengths = {len(problem.target) for problem in problems}
    if len(lengths) > 1:
        raise ValueError(f"problem.target: expected one length in a batch, got {sorted(lengths)}")
    targets = torch.tensor([problem.target for problem in problems], dtype=torch.float32)
    if targets.numel():
        validate_target(targets, num_categories or targets.shape[-1], "problem.target")
    return targets.to(device)
