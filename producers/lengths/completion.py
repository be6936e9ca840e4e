"""What a predictor learns from: one finished completion, with the prompt that led to it."""

from dataclasses import dataclass

from schemas.messages.prompts import Prompt
from schemas.messages.trajectories import FinishReason, Trajectory


@dataclass(frozen=True, slots=True)
class Completion:
    """``length`` in tokens; ``version``: number of the newest weights that sampled it.

    ``censored``: the limit cut it off, so that its own length would have been this or more.
    """

    prompt: Prompt
    group_id: str
    length: int
    version: int = 0
    censored: bool = False

    @classmethod
    def of(cls, trajectory: Trajectory, prompt: Prompt | None = None) -> "Completion":
        """From the topic's record; without the prompt that was ordered, from the record's text of it."""
        if prompt is None:
            prompt = Prompt(prompt_id=trajectory.prompt_id, dataset=trajectory.dataset, content=trajectory.prompt_text)
        return cls(
            prompt=prompt,
            group_id=trajectory.group_id,
            length=len(trajectory.token_ids),
            version=trajectory.newest_version.number,
            censored=trajectory.finish_reason is FinishReason.LENGTH,
        )
