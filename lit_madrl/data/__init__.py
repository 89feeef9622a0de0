"""LightningDataModules and the endless prompt sampler."""

from lit_madrl.data.chain import ChainDataModule, Student
from lit_madrl.data.choice import ChoiceDataModule
from lit_madrl.data.prompts import EndlessPromptSampler, PromptDataModule

__all__ = ["ChainDataModule", "ChoiceDataModule", "EndlessPromptSampler", "PromptDataModule", "Student"]
