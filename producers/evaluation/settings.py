"""``[evaluation]``: the held-out prompts, and how often and how they are sampled."""

from typing import Annotated, Self

from pydantic import Field, StringConstraints, model_validator

from streamrl.producers.prompts.settings import DataSettings
from streamrl.schemas.settings import Section

SetName = Annotated[str, StringConstraints(pattern=r"^[a-z0-9][a-z0-9._-]{0,31}$")]


class HeldOutSettings(Section):
    """``[evaluation]``: evaluation of held-out prompts during a run."""

    data: Annotated[
        dict[SetName, DataSettings],
        Field(
            description="Held-out sets by name, each with the settings of [data], such as [evaluation.data.held_out]; "
            "none: no evaluation during the run."
        ),
    ] = {}
    every: Annotated[
        int, Field(ge=1, description="Optimizer steps between two evaluated versions, starting with step 0.")
    ] = 20
    prompts: Annotated[
        int, Field(ge=1, le=100_000, description="Prompts of each set that are evaluated: always the first ones.")
    ] = 64
    samples: Annotated[int, Field(ge=1, le=4096, description="Completions sampled for each prompt.")] = 1
    k: Annotated[
        tuple[int, ...],
        Field(description="Values of k for which pass@k is reported besides 1, at most samples; none: samples."),
    ] = ()
    passes_at: Annotated[
        float, Field(description="A completion passes if the weighted sum of its rewards is at least this.")
    ] = 1.0
    temperature: Annotated[
        float | None, Field(ge=0, le=100, description="Sampling temperature; 0: greedy; unset: loop.temperature.")
    ] = None
    share: Annotated[
        float,
        Field(gt=0, le=1, description="Largest share of a worker's slots that evaluation takes at a time."),
    ] = 0.125
    patience_s: Annotated[
        float,
        Field(ge=0, description="Longest time that the end of a run waits for the evaluation of its last weights."),
    ] = 600.0

    @model_validator(mode="after")
    def _k_is_possible(self) -> Self:
        if wrong := [k for k in self.k if not 1 <= k <= self.samples]:
            most = f"from 1 to evaluation.samples ({self.samples})"
            raise ValueError(f"expected each of evaluation.k {most}, got {wrong[0]}; lower it")
        return self

    @property
    def told_k(self) -> tuple[int, ...]:
        """The values of k for which pass@k is reported, ascending."""
        return tuple(sorted({1, *(self.k or (self.samples,))}))

    def slots(self, max_num_seqs: int) -> int:
        """Evaluation's share of a worker's slots; 0 without an evaluation."""
        return max(1, int(max_num_seqs * self.share)) if self.data else 0

    def is_due(self, step: int) -> bool:
        """Whether the weights of this step are evaluated, if they are exported."""
        return bool(self.data) and step % self.every == 0

    def newest_due(self, last: int, exported_every: int) -> int:
        """The newest step whose weights are evaluated, up to step ``last``, which is always exported."""
        exported = (step for step in range(last, -1, -1) if step == last or step % exported_every == 0)
        return next(step for step in exported if self.is_due(step))


SECTIONS = {"evaluation": HeldOutSettings}
