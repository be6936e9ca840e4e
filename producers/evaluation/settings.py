"""``[evaluation]``: what is held out during a run, how often and how it is sampled."""

from typing import Annotated, Self

from pydantic import Field, StringConstraints, model_validator

from streamrl.producers.prompts.settings import DataSettings
from streamrl.schemas.settings import Section

SetName = Annotated[str, StringConstraints(pattern=r"^[a-z0-9][a-z0-9._-]{0,31}$")]


class HeldOutSettings(Section):
    """``[evaluation]``: held-out prompts during a run."""

    data: Annotated[
        dict[SetName, DataSettings],
        Field(
            description="During a run: held-out sets by name, each as [data], such as [evaluation.data.held_out]; "
            "none: no evaluation during it."
        ),
    ] = {}
    every: Annotated[int, Field(ge=1, description="Optimizer steps between evaluated weights, from step 0 on.")] = 20
    prompts: Annotated[int, Field(ge=1, le=100_000, description="Of each set, always the same ones.")] = 64
    samples: Annotated[int, Field(ge=1, le=4096, description="Completions sampled of each prompt.")] = 1
    k: Annotated[
        tuple[int, ...],
        Field(description="pass@k is told for these numbers besides 1, at most samples; none: for samples."),
    ] = ()
    passes_at: Annotated[
        float, Field(description="A completion passes whose weighted sum of rewards is at least this.")
    ] = 1.0
    temperature: Annotated[
        float | None, Field(ge=0, le=100, description="Of its samples; 0: greedy; unset: loop.temperature.")
    ] = None
    share: Annotated[
        float,
        Field(gt=0, le=1, description="Of a worker's slots, at most so many are the evaluation's at a time."),
    ] = 0.125
    patience_s: Annotated[
        float,
        Field(ge=0, description="How long the end of a run waits for the evaluation of its last weights."),
    ] = 600.0

    @model_validator(mode="after")
    def _can_be_told(self) -> Self:
        if wrong := [k for k in self.k if not 1 <= k <= self.samples]:
            most = f"from 1 to evaluation.samples ({self.samples})"
            raise ValueError(f"expected each of evaluation.k {most}, got {wrong[0]}; lower it")
        return self

    @property
    def told_k(self) -> tuple[int, ...]:
        """The numbers that pass@k is told for, ascending."""
        return tuple(sorted({1, *(self.k or (self.samples,))}))

    def slots(self, max_num_seqs: int) -> int:
        """Of so many slots of a worker, the evaluation's at a time; none without an evaluation."""
        return max(1, int(max_num_seqs * self.share)) if self.data else 0

    def is_due(self, step: int) -> bool:
        """Whether the weights of this step are evaluated, if they are exported."""
        return bool(self.data) and step % self.every == 0

    def newest_due(self, last: int, exported_every: int) -> int:
        """Of the steps up to the last, which is exported in any case, the newest whose weights are evaluated."""
        exported = (step for step in range(last, -1, -1) if step == last or step % exported_every == 0)
        return next(step for step in exported if self.is_due(step))


SECTIONS = {"evaluation": HeldOutSettings}
