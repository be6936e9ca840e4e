"""Whether a prompt can be sampled: its tokens, or what is wrong with it. The same answer for a worker and beforehand.

A worker refuses one prompt by it, ``survey`` counts what many of a data set would come to. Knows no engine, no model.
"""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import NamedTuple

from producers.generation.engines.port import Tokenizer
from schemas.errors import ModelError, PromptRefused
from schemas.trajectories import Prompt

MAX_SAID = 200
"""Characters of what a chat template says, which may print the whole prompt."""


def encoded(tokenizer: Tokenizer, prompt: Prompt, longest: int) -> list[int]:
    """The prompt's tokens, ``longest`` at most.

    Raises:
        PromptRefused: it has no tokens or too many, or cannot be tokenised.
    """
    try:
        token_ids = tokenizer.encode_prompt(prompt)
    except ModelError as error:  # names what the model lacks, and for which prompts
        raise PromptRefused("no chat template", str(error)) from error
    except Exception as error:  # chat templates raise what they like
        said = f"{type(error).__name__}: {error}"[:MAX_SAID]
        raise PromptRefused("cannot be tokenised", f"expected a prompt that can be tokenised, got {said}") from error
    refuse_unfit(token_ids, longest)
    return token_ids


def refuse_unfit(token_ids: Sequence[int], longest: int) -> None:
    """Refuse a prompt of no tokens, or of more than ``longest``.

    Raises:
        PromptRefused: it is one.
    """
    expected = f"expected a prompt of 1 to {longest} tokens, got {len(token_ids)}"
    if not token_ids:
        raise PromptRefused("no tokens", expected)
    if len(token_ids) > longest:
        raise PromptRefused(f"longer than {longest} tokens", expected)


class RefusedPrompts(NamedTuple):
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
            refused[error.cause] = first._replace(count=first.count + 1)
    return PromptSurvey(lengths, refused)
