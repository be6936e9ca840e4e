"""Draws prompts and has their lengths estimated. Where that is slow it is done ahead, so that no slot waits for it."""

import asyncio
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace

from producers.lengths.predictor import LengthPredictor
from producers.prompts.sources.source import PromptSource
from schemas.identifiers import make_group_id
from schemas.messages.prompts import LengthEstimate, Prompt

SLICE = 64
"""Prompts drawn between two chances for others to run."""
SLOW_S = 0.1
"""A window that takes longer to draw is drawn ahead; and as long may it take to bring estimates up to date."""


@dataclass(frozen=True, slots=True)
class Draft:
    """A prompt that is not ordered yet."""

    position: int
    prompt: Prompt
    group_id: str
    estimate: LengthEstimate


@dataclass
class Drafts:
    """Drafts from a source and a predictor. ``alive`` is called once a slice."""

    source: PromptSource
    predictor: LengthPredictor
    clock: Callable[[], float]
    alive: Callable[[], None]
    _ahead: dict[int, Draft] = field(default_factory=dict)
    _draft_s: float = 0.0

    async def draw(self, positions: Sequence[int]) -> list[Draft]:
        """The prompts at these positions, with estimates of now; those drawn ahead may keep an older one."""
        await self._read([position for position in positions if position not in self._ahead])
        drafts = [self._ahead.pop(position) for position in positions]
        began = self.clock()
        for number, draft in enumerate(drafts):
            if self.clock() - began > SLOW_S:
                break
            drafts[number] = replace(draft, estimate=self.predictor.predict(draft.prompt, draft.group_id))
        return drafts

    def is_slow(self, count: int) -> bool:
        """Whether so many prompts should be drawn ahead."""
        return self._draft_s * count > SLOW_S

    async def prepare(self, positions: Sequence[int]) -> bool:
        """Draw a slice of these ahead; true if there are more."""
        missing = [position for position in positions if position not in self._ahead]
        await self._read(missing[:SLICE])
        return len(missing) > SLICE

    async def _read(self, positions: Sequence[int]) -> None:
        for start in range(0, len(positions), SLICE):
            part, began = positions[start : start + SLICE], self.clock()
            found = await asyncio.to_thread(self._prompts, part)
            for position, (prompt, data_pass) in zip(part, found, strict=True):
                group_id = make_group_id(prompt.prompt_id, data_pass)
                self._ahead[position] = Draft(position, prompt, group_id, self.predictor.predict(prompt, group_id))
            self._draft_s = max(0.0, self.clock() - began) / len(part)
            self.alive()

    def _prompts(self, positions: Sequence[int]) -> list[tuple[Prompt, int]]:
        return [self.source.prompt_at(position) for position in positions]
