"""LightningDataModules, the endless prompt sampler and the sources that data modules read."""

from lit_madrl.data.chain import ChainDataModule, Student
from lit_madrl.data.choice import ChoiceDataModule
from lit_madrl.data.math import ReferenceMathDataModule
from lit_madrl.data.math_formats import GSM8K, MATH, Competition, DeepMath, Screened, StepwiseMATH
from lit_madrl.data.math_sources import MathProblem, MathSource
from lit_madrl.data.prompts import EndlessPromptSampler, PromptDataModule

__all__ = [
    "GSM8K",
    "MATH",
    "ChainDataModule",
    "ChoiceDataModule",
    "Competition",
    "DeepMath",
    "EndlessPromptSampler",
    "MathProblem",
    "MathSource",
    "PromptDataModule",
    "ReferenceMathDataModule",
    "Screened",
    "StepwiseMATH",
    "Student",
]
