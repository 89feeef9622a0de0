"""Categorizers and verifiers: what judges a completion's text."""

from lit_madrl.tasks.base import Categorizer, Completions, Verifier
from lit_madrl.tasks.chain import ChainVerifier
from lit_madrl.tasks.choice import ChoiceCategorizer
from lit_madrl.tasks.math import MathVerifier

__all__ = ["Categorizer", "ChainVerifier", "ChoiceCategorizer", "Completions", "MathVerifier", "Verifier"]
