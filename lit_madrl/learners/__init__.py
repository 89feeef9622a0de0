"""LightningModules: the supervised warm start and the GRPO learner."""

from lit_madrl.learners.base import PolicyLearner
from lit_madrl.learners.experience import Experience
from lit_madrl.learners.grpo import GRPOLearner
from lit_madrl.learners.objective import Importance, Objective
from lit_madrl.learners.schedule import Schedule
from lit_madrl.learners.sft import SFTLearner

__all__ = ["Experience", "GRPOLearner", "Importance", "Objective", "PolicyLearner", "SFTLearner", "Schedule"]
