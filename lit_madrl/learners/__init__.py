"""LightningModules: the supervised warm start and the GRPO learner."""

from lit_madrl.learners.base import PolicyLearner
from lit_madrl.learners.grpo import Experience, GRPOLearner, Objective
from lit_madrl.learners.schedule import Schedule
from lit_madrl.learners.sft import SFTLearner

__all__ = ["Experience", "GRPOLearner", "Objective", "PolicyLearner", "SFTLearner", "Schedule"]
