"""ARG's theorems as exact identities, by enumeration of all trajectories of a small policy in float64."""

from __future__ import annotations

import itertools
import math
from functools import cached_property

import pytest
import torch
from torch import Tensor

from lit_madrl.augmenters import PrefixSelector
from lit_madrl.functional import group_advantages, prefix_length, reference_surprisal

DEPTH, VOCABULARY, END = 4, 3, 0
SEEDS = range(12)
TRAJECTORIES = [
    (*tokens, END)
    for length in range(DEPTH)
    for tokens in itertools.product(range(1, VOCABULARY), repeat=length)
]


class Policy:
    """A categorical policy with its own logits after each prefix; the token at the last depth must be the end.

    Some trajectories are correct, some not; ``reference`` is a correct one of at least three tokens, and there is
    another correct one.
    """

    def __init__(self, seed: int) -> None:
        generator = torch.Generator().manual_seed(seed)
        nodes = sorted({trajectory[:t] for trajectory in TRAJECTORIES for t in range(DEPTH - 1)})
        self.node = {prefix: i for i, prefix in enumerate(nodes)}
        logits = 1.5 * torch.randn(len(nodes), VOCABULARY, generator=generator, dtype=torch.float64)
        self.logits = logits.requires_grad_()
        self.correct = torch.rand(len(TRAJECTORIES), generator=generator) < 0.4
        long = [i for i, trajectory in enumerate(TRAJECTORIES) if len(trajectory) >= 3]
        chosen = torch.randperm(len(long), generator=generator)[:3].tolist()
        self.reference, other, wrong = (long[i] for i in chosen)
        self.correct[self.reference] = self.correct[other] = True
        self.correct[wrong] = False
        self.logprobs = torch.stack([self.token_logprobs(y).sum() for y in TRAJECTORIES])
        self.probs = self.logprobs.detach().exp()

    def token_logprobs(self, trajectory: tuple[int, ...]) -> Tensor:
        table = self.logits.log_softmax(-1)
        free = trajectory[: DEPTH - 1]
        tokens = [table[self.node[free[:t]], token] for t, token in enumerate(free)]
        return torch.stack(tokens + [table.new_zeros(())] * (len(trajectory) - len(free)))

    @cached_property
    def success(self) -> Tensor:
        """p, differentiable."""
        return self.logprobs.exp()[self.correct].sum()

    @cached_property
    def surprisal(self) -> Tensor:
        """S_t of the reference, ``[T + 1]``."""
        tokens = self.token_logprobs(TRAJECTORIES[self.reference]).detach()
        return reference_surprisal(tokens[None], torch.tensor([len(tokens)]))[0]

    @cached_property
    def scores(self) -> Tensor:
        """grad log pi(y) of each trajectory, ``[n, parameters]``."""
        return torch.stack([self.gradient(logprob) for logprob in self.logprobs])

    def gradient(self, value: Tensor) -> Tensor:
        return torch.autograd.grad(value, self.logits, retain_graph=True)[0].flatten()

    def replacements(self, t: int) -> Tensor:
        """Probability of each trajectory to continue the first t tokens of the reference, be correct and not it."""
        prefix = TRAJECTORIES[self.reference][:t]
        extends = torch.tensor([trajectory[:t] == prefix for trajectory in TRAJECTORIES])
        conditional = self.probs * extends / self.probs[extends].sum()
        accepted = conditional * self.correct
        accepted[self.reference] = 0.0
        return accepted

    def accepted(self, t: int, continuations: int = 1) -> Tensor:
        """Q_t: the first replacement among some independent continuations, else the reference."""
        replacements = self.replacements(t)
        d = replacements.sum()
        found = 1 - (1 - d) ** continuations
        q = replacements * (found / d) if d > 0 else replacements
        q[self.reference] = 1 - found
        return q

    def divergence(self, q: Tensor) -> Tensor:
        """KL(q || nu) with q constant, differentiable through nu = pi given correct."""
        held = q > 0
        log_nu = self.logprobs - self.success.log()
        return (q[held] * (q[held].log() - log_nu[held])).sum()

    @property
    def cuts(self) -> range:
        return range(len(TRAJECTORIES[self.reference]))


@pytest.fixture(params=SEEDS)
def policy(request: pytest.FixtureRequest) -> Policy:
    return Policy(request.param)


def xlogx(x: float) -> float:
    return x * math.log(x) if x > 0 else 0.0


def test_the_trajectories_are_all_there(policy):
    assert len(TRAJECTORIES) == 15
    assert policy.probs.sum().item() == pytest.approx(1, abs=1e-14)
    assert policy.surprisal[0].item() == pytest.approx(-policy.logprobs[policy.reference].item(), abs=1e-13)
    assert any(policy.replacements(t).sum() > 0 for t in policy.cuts)


@pytest.mark.parametrize("continuations", [1, 2, 8])
def test_theorem_1(policy, continuations):
    """KL(Q_t || nu) = log(p / pi(r)) - D S_t + D log(D / d) + (1 - D) log(1 - D); D = d for one continuation."""
    reference_alone = policy.success.log().item() + policy.surprisal[0].item()
    for t in policy.cuts:
        q = policy.accepted(t, continuations)
        d = policy.replacements(t).sum().item()
        found = 1 - (1 - d) ** continuations
        bonus = found * math.log(found / d) if d > 0 else 0.0
        closed = reference_alone - found * policy.surprisal[t].item() + bonus + xlogx(1 - found)
        assert q.sum().item() == pytest.approx(1, abs=1e-13)
        if continuations == 1:
            assert bonus == pytest.approx(0, abs=1e-13)
            assert policy.divergence(q).item() <= reference_alone + 1e-12
        assert policy.divergence(q).item() == pytest.approx(closed, abs=1e-12)


def prefixes(policy: Policy, levels: tuple[float, ...]) -> list[int]:
    return [prefix_length(policy.surprisal, level, list(policy.cuts)[1:]) for level in levels]


def outcomes(selector: PrefixSelector, policy: Policy) -> list[tuple[int, float, float]]:
    """Level, feedback and probability of every result of one continuation."""
    rows = []
    for a, t in enumerate(prefixes(policy, selector.levels)):
        d = policy.replacements(t).sum().item()
        ratio = (policy.surprisal[t] / policy.surprisal[0]).item()
        for success, probability in ((True, d), (False, 1 - d)):
            w = selector.feedback(success, True, ratio).item()
            rows.append((a, w, selector.probabilities()[a].item() * probability))
    return rows


@pytest.mark.parametrize("baseline", [0.0, 0.37, -2.0])
@pytest.mark.parametrize("weighting", [True, False])
def test_the_selector_update_is_unbiased(policy, baseline, weighting):
    """E[update] / eta = N grad J for N continuations, J = sum_a rho_a d_a S_a / S_0, whatever the baseline."""
    phi = torch.randn(3, generator=torch.Generator().manual_seed(1), dtype=torch.float64)

    def fresh() -> PrefixSelector:
        selector = PrefixSelector(surprisal_weighting=weighting)
        selector.phi.copy_(phi)
        selector.baseline.fill_(baseline)
        return selector

    selector = fresh()
    free = phi.clone().requires_grad_()
    rho = 0.8 * free.softmax(-1) + 0.2 / 3
    values = []
    for t in prefixes(policy, selector.levels):
        d = policy.replacements(t).sum()
        values.append(d * policy.surprisal[t] / policy.surprisal[0] if weighting else d)
    (gradient,) = torch.autograd.grad((rho * torch.stack(values)).sum(), free)
    for count in (1, 2):
        expected = torch.zeros_like(phi)
        for drawn in itertools.product(outcomes(selector, policy), repeat=count):
            levels, feedback, probability = zip(*drawn, strict=True)
            updated = fresh()
            updated.update(
                torch.tensor(levels), torch.tensor(feedback, dtype=torch.float64), lambda sums: sums
            )
            expected += math.prod(probability) * (updated.phi - phi) / updated.learning_rate
        torch.testing.assert_close(expected, count * gradient, rtol=0, atol=1e-13)


def target(policy: Policy, q: Tensor, size: int, inserted: int, eps: float = 1e-6) -> Tensor:
    """c_m grad [log(p / (1 - p)) - KL(Q || nu)], c_m = m(G - m) / (G (sqrt(m(G - m) / (G(G - 1))) + eps))."""
    product = inserted * (size - inserted)
    scale = product / (size * (math.sqrt(product / (size * (size - 1))) + eps))
    p = policy.success
    return scale * policy.gradient((p / (1 - p)).log() - policy.divergence(q))


def advantages(size: int, inserted: int) -> Tensor:
    rewards = torch.tensor([[1.0] * inserted + [0.0] * (size - inserted)], dtype=torch.float64)
    return group_advantages(rewards, "sample", eps=1e-6)[0]


@pytest.mark.parametrize("inserted", [1, 2, 4])
def test_the_expected_group_update(policy, inserted):
    """E[sum_i A_i grad log pi(y_i)] (equation 25): insertions from Q, the rest failures of the policy."""
    failures = policy.probs * ~policy.correct / policy.probs[~policy.correct].sum()
    a = advantages(8, inserted)
    for t in policy.cuts:
        q = policy.accepted(t)
        expected = a[:inserted].sum() * (q @ policy.scores) + a[inserted:].sum() * (failures @ policy.scores)
        torch.testing.assert_close(expected, target(policy, q, 8, inserted), rtol=0, atol=1e-12)


def test_one_insertion_has_the_scale_of_the_paper():
    size, eps = 8, 1e-6
    a = advantages(size, 1)
    assert a[0].item() == pytest.approx((size - 1) / (size * (1 / math.sqrt(size) + eps)), abs=1e-14)
    assert a.sum().item() == pytest.approx(0, abs=1e-14)


@pytest.mark.parametrize("inserted", [1, 2])
def test_the_expected_group_update_group_by_group(inserted):
    """The same over every whole group of three, each with its own advantages."""
    policy = Policy(3)
    failures = policy.probs * ~policy.correct / policy.probs[~policy.correct].sum()
    q = policy.accepted(1)
    laws = [q] * inserted + [failures] * (3 - inserted)
    groups = torch.cartesian_prod(*[torch.arange(len(TRAJECTORIES))] * 3)
    weights = torch.stack([law[groups[:, i]] for i, law in enumerate(laws)]).prod(0)
    groups, weights = groups[weights > 0], weights[weights > 0]
    a = group_advantages(policy.correct[groups].double(), "sample", eps=1e-6)
    expected = torch.einsum("n,ng,ngd->d", weights, a, policy.scores[groups])
    torch.testing.assert_close(expected, target(policy, q, 3, inserted), rtol=0, atol=1e-12)


def test_the_ideal_distribution_gives_the_gradient_of_success(policy):
    """Q = nu: the update is proportional to grad p."""
    nu = policy.probs * policy.correct / policy.probs[policy.correct].sum()
    p = policy.success
    scale = advantages(8, 1)[0].item() / (p * (1 - p)).item()
    torch.testing.assert_close(target(policy, nu, 8, 1), scale * policy.gradient(p), rtol=0, atol=1e-12)
