"""The papers' formulas as pure torch functions: no classes, no state."""

from lit_madrl.functional.advantages import Scale, dead_groups, group_advantages
from lit_madrl.functional.divergences import (
    forward_kl,
    forward_kl_reward,
    jensen_shannon,
    jensen_shannon_reward,
    l2,
    l2_reward,
    reverse_kl,
    reverse_kl_reward,
    smooth_target,
    validate_target,
)
from lit_madrl.functional.estimator_floor import estimator_floor
from lit_madrl.functional.frequencies import (
    Over,
    category_counts,
    group_frequencies,
    group_total,
    leave_one_out_frequencies,
)
from lit_madrl.functional.importance import (
    masked_weights,
    mean_of_copies,
    out_of_bounds,
    sequence_log_ratios,
    truncated_weights,
)
from lit_madrl.functional.kl import KLKind, kl_estimate, linearized_exp
from lit_madrl.functional.logprobs import selected_logprobs
from lit_madrl.functional.pass_at_k import average_at_k, pass_at_k
from lit_madrl.functional.policy_loss import (
    Reduction,
    clip_fraction,
    clipped_surrogate,
    token_weights,
    weighted_token_sum,
)
from lit_madrl.functional.surprisal import prefix_length, reference_surprisal

__all__ = [
    "KLKind",
    "Over",
    "Reduction",
    "Scale",
    "average_at_k",
    "category_counts",
    "clip_fraction",
    "clipped_surrogate",
    "dead_groups",
    "estimator_floor",
    "forward_kl",
    "forward_kl_reward",
    "group_advantages",
    "group_frequencies",
    "group_total",
    "jensen_shannon",
    "jensen_shannon_reward",
    "kl_estimate",
    "l2",
    "l2_reward",
    "leave_one_out_frequencies",
    "linearized_exp",
    "masked_weights",
    "mean_of_copies",
    "out_of_bounds",
    "pass_at_k",
    "prefix_length",
    "reference_surprisal",
    "reverse_kl",
    "reverse_kl_reward",
    "selected_logprobs",
    "sequence_log_ratios",
    "smooth_target",
    "token_weights",
    "truncated_weights",
    "validate_target",
    "weighted_token_sum",
]
