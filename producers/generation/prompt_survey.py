"""How many of a data set's prompts a worker would refuse, and why: counted beforehand, by the worker's own rule."""

from collections.abc import Iterable
from dataclasses import dataclass, replace

from streamrl.producers.generation.engines.port import Tokenizer, encoded
from streamrl.schemas.errors import PromptRefused
from streamrl.schemas.trajectories import Prompt


@dataclass(frozen=True)
class RefusedPrompts:
    """How many prompts are refused for one cause, and the first of them with what was wrong with it."""

    count: int
    prompt_id: str
    detail: str


@dataclass(frozen=True)
class PromptSurvey:
    """What some prompts come to: tokens of those that can be sampled, by prompt id, and the others, by cause."""

    lengths: dict[str, int]
    refused: dict[str, RefusedPrompts]

    @property
    def checked(self) -> int:
        """Prompts looked at."""
        return len(self.lengths) + self.refused_count

    @property
    def refused_count(self) -> int:
        """Prompts refused, for whatever cause."""
        return sum(found.count for found in self.refused.values())

    def causes(self) -> str:
        """The refused ones in words: how many for each cause, most first, and one of them."""
        ordered = sorted(self.refused.items(), key=lambda item: -item[1].count)
        counts = ", ".join(f"{found.count:,} {cause}" for cause, found in ordered)
        return f"{counts}; {ordered[0][1].prompt_id}: {ordered[0][1].detail}"


def survey(tokenizer: Tokenizer, prompts: Iterable[Prompt], longest: int) -> PromptSurvey:
    """Tokenise prompts as a worker would; ``longest``: tokens that it takes at most."""
    lengths: dict[str, int] = {}
    refused: dict[str, RefusedPrompts] = {}
    for prompt in prompts:
        try:
            lengths[prompt.prompt_id] = len(encoded(tokenizer, prompt, longest))
        except PromptRefused as error:
            first = refused.get(error.cause, RefusedPrompts(0, prompt.prompt_id, str(error)))
            refused[error.cause] = replace(first, count=first.count + 1)
    return PromptSurvey(lengths, refused)
