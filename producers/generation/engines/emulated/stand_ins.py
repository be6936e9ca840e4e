"""What stands in for a tokenizer and for rewards where there is no model: filler ids, and a constant."""

import math
from collections.abc import Sequence

from producers.generation.engines.emulated.engine import FILLER_ID
from producers.rewards.runner import ScoreRequest, Scores
from schemas.messages.prompts import Prompt

REWARD = 1.0


class FillerTokenizer:
    """A ``Tokenizer`` that counts: a prompt has one token for so many characters, and a completion has no text."""

    def __init__(self, characters_per_token: float) -> None:
        self._characters_per_token = characters_per_token

    def encode_prompt(self, prompt: Prompt) -> list[int]:
        """As many filler ids as the prompt would have tokens, at least one."""
        return [FILLER_ID] * max(1, math.ceil(len(prompt.text) / self._characters_per_token))

    def decode(self, token_ids: Sequence[int]) -> str:
        """How many there are; short, whatever the completion is."""
        return f"({len(token_ids)} emulated tokens)"


class ConstantRewards:
    """Gives every completion the same reward under each of the names, at once and in this process."""

    def __init__(self, names: tuple[str, ...]) -> None:
        self.names = names

    async def start(self) -> None:
        """Nothing is loaded."""

    async def score(self, request: ScoreRequest) -> Scores:
        """The constant."""
        return Scores(dict.fromkeys(self.names, REWARD), {})

    async def close(self) -> None:
        """Nothing is held."""
