"""A fine-tuned language model as a predictor asks it: by prompt, one at a time, each text once.

A forward pass costs milliseconds or more, and a prompt is asked about when it is sent and when it comes back; so what
was said of a text is kept. Knows no library.
"""

from collections import OrderedDict
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Protocol

import xxhash

from schemas.messages.prompts import Prompt

MAX_KEPT = 65_536


class Regressor(Protocol):
    """Scores texts."""

    def score(self, texts: Sequence[str]) -> list[tuple[float, float]]:
        """Median and upper of each text, standardised."""
        ...


@dataclass(frozen=True, slots=True)
class LanguageModel:
    """``scale``: what the regressor's numbers are multiplied by to be logarithms of length over the level."""

    regressor: Regressor
    scale: float
    version: int
    policy_version: int
    observations: int
    _said: OrderedDict[int, tuple[float, float]] = field(default_factory=OrderedDict)

    @property
    def name(self) -> str:
        """How estimates call it."""
        return f"language_model/v{self.version}"

    def quantiles(self, prompt: Prompt) -> tuple[float, float]:
        """Median and upper of the logarithm of length over its data set's level, by the prompt's text."""
        key = xxhash.xxh3_64_intdigest(prompt.text.encode("utf-8", "replace"))
        said = self._said.get(key)
        if said is None:
            ((median, upper),) = self.regressor.score([prompt.text])
            said = self._said[key] = (median * self.scale, upper * self.scale)
            if len(self._said) > MAX_KEPT:
                self._said.popitem(last=False)
        return said
