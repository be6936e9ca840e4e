"""Counts in advance how many of a data set's prompts a worker would refuse, and why, by the worker's own rule."""

from collections.abc import Iterable
from dataclasses import dataclass, replace

from streamrl.producers.generation.engines.port import Tokenizer, encoded, refuse_unknown
from streamrl.schemas.errors import PromptRefused
from streamrl.schemas.trajectories import Prompt


@dataclass(frozen=True)
class RefusedPrompts:
    """The number of prompts refused for one cause, and the first of them with the detailed reason."""

    count: int
    prompt_id: str
    detail: str


@dataclass(frozen=True)
class PromptSurvey:
    """The prompts that can be sampled and those that cannot. ``lengths``: tokens of the former, by prompt id;
    ``refused``: the latter, by cause.
    """

    lengths: dict[str, int]
    refused: dict[str, RefusedPrompts]

    @property
    def checked(self) -> int:
        """Number of prompts checked."""
        return len(self.lengths) + self.refused_count

    @property
    def refused_count(self) -> int:
        """Number of prompts refused for any cause."""
        return sum(found.count for found in self.refused.values())

    def causes(self) -> str:
        """A line on the refused prompts: the count of each cause, highest first, and one example."""
        ordered = sorted(self.refused.items(), key=lambda item: -item[1].count)
        counts = ", ".join(f"{found.count:,} {cause}" for cause, found in ordered)
        return f"{counts}; {ordered[0][1].prompt_id}: {ordered[0][1].detail}"


def survey(tokenizer: Tokenizer, prompts: Iterable[Prompt], longest: int, vocab_size: int) -> PromptSurvey:
    """Tokenise prompts as a worker would. ``longest``: most tokens of a prompt; ``vocab_size``: the model's."""
    lengths: dict[str, int] = {}
    refused: dict[str, RefusedPrompts] = {}
    for prompt in prompts:
        try:
            token_ids = encoded(tokenizer, prompt, longest)
            refuse_unknown(token_ids, vocab_size)
            lengths[prompt.prompt_id] = len(token_ids)
        except PromptRefused as error:
            first = refused.get(error.cause, RefusedPrompts(0, prompt.prompt_id, str(error)))
            refused[error.cause] = replace(first, count=first.count + 1)
    return PromptSurvey(lengths, refused)
