"""The groups that a run will generate: its own prompts, their emulated or recorded lengths, and what is predicted."""

import math
import random
from collections.abc import Sequence
from dataclasses import dataclass, field

from deploy.planning.simulation.work import Work
from deploy.settings.tree import Settings
from producers.dispatch.window.drafts import Draft
from producers.generation.engines.emulated.lengths import trace_length
from producers.lengths.predictor import LengthPredictor, build_predictor
from producers.prompts.sources.source import PromptSource, open_source
from schemas.identifiers import make_group_id
from schemas.messages.prompts import Prompt


@dataclass
class RunSupply:
    """A ``Supply``. ``recorded``: lengths seen in an earlier run, drawn from in place of the emulated trace."""

    settings: Settings
    recorded: Sequence[int] = ()
    source: PromptSource | None = None
    predictor: LengthPredictor = field(init=False)
    _drawn: dict[int, tuple[Prompt, int]] = field(default_factory=dict)

    def __post_init__(self) -> None:
        self._source = self.source or open_source(self.settings.data, run_seed=self.settings.run.seed)
        self.predictor = build_predictor(self.settings.lengths, self.settings.loop, self.length_of)

    def afresh(self, settings: Settings) -> "RunSupply":
        """The same prompts for other settings, nothing learnt yet."""
        fresh = RunSupply(settings, self.recorded, self._source)
        fresh._drawn = self._drawn
        return fresh

    def draft(self, position: int) -> Draft:
        """The prompt at a position with the estimate of now."""
        if position not in self._drawn:
            self._drawn[position] = self._source.prompt_at(position)
        prompt, data_pass = self._drawn[position]
        group_id = make_group_id(prompt.prompt_id, data_pass)
        return Draft(position, prompt, group_id, self.predictor.predict(prompt, group_id))

    def work(self, draft: Draft) -> Work:
        """What sampling it takes."""
        per_token = self.settings.emulation.lengths.prompt_characters_per_token
        samples = range(self.settings.loop.num_generations)
        return Work(
            group_id=draft.group_id,
            position=draft.position,
            prompt_tokens=max(1, math.ceil(len(draft.prompt.text) / per_token)),
            lengths=tuple(self.length_of(draft.group_id, index, draft.prompt) for index in samples),
        )

    def length_of(self, group_id: str, sample_index: int, prompt: Prompt) -> int:
        """Tokens of a sample's completion, within the limit."""
        if self.recorded:
            length = random.Random(f"{group_id}/{sample_index}").choice(self.recorded)
        else:
            length = trace_length(self.settings.emulation.lengths, group_id, sample_index, prompt)
        return min(length, self.settings.loop.max_completion_length)
