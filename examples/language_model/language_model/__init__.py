"""A language model on catnat: :class:`LanguageModel`, and any text as :class:`TextData`."""

from .data import TextData
from .model import LanguageModel

__all__ = ["LanguageModel", "TextData"]
