"""``[evaluation]``: the held-out prompts, and how often and how they are sampled."""

from typing import Annotated, Any, Self

from pydantic import Field, StringConstraints, model_validator

from streamrl.producers.prompts.settings import DataSettings
from streamrl.schemas.settings import Section

PATIENCE_S = 1800.0
"""Longest time in seconds that the end of a run waits for the evaluation of its last weights. An evaluation that makes
progress ends sooner; one without workers never ends."""
SLOTS_SHARE = 0.125
"""Largest share of a worker's slots that evaluation takes at a time, so that training hardly notices it."""
COLUMNS = ("format", "prompt_column", "answer_column")
WORDING = ("prompt_template", "system_prompt", "conversational", "chat_template_kwargs")
"""Settings of ``[data]`` that a held-out set takes over, unless it has its own; ``COLUMNS`` only for stored prompts."""
SetName = Annotated[str, StringConstraints(pattern=r"^[a-z0-9][a-z0-9._-]{0,31}$")]


class HeldOutSettings(Section):
    """``[evaluation]``: evaluation of held-out prompts during a run."""

    data: Annotated[
        dict[SetName, DataSettings],
        Field(
            description="Held-out sets by name, each with the settings of [data], such as [evaluation.data.held_out]. "
            "Format, columns, prompt_template, system_prompt and conversational are those of [data] unless the set has "
            "its own; chat_template_kwargs always are. No set: no evaluation during the run."
        ),
    ] = {}
    every: Annotated[
        int,
        Field(
            ge=0,
            description="Optimizer steps between two evaluated versions, starting with step 0; 0: no evaluation.",
        ),
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
        float | str | None,
        Field(
            description="What makes a completion pass. A number: the least weighted sum of its rewards. The name of a "
            "reward: that reward is 1 or more. Unset: the weighted sum is at least the sum of the positive weights."
        ),
    ] = None
    temperature: Annotated[
        float | None, Field(ge=0, le=100, description="Sampling temperature; 0: greedy; unset: loop.temperature.")
    ] = None

    @model_validator(mode="after")
    def _k_is_possible(self) -> Self:
        if wrong := [k for k in self.k if not 1 <= k <= self.samples]:
            most = f"from 1 to evaluation.samples ({self.samples})"
            raise ValueError(f"expected each of evaluation.k {most}, got {wrong[0]}; lower it")
        if self.temperature == 0 and self.samples > 1:
            raise ValueError(
                "expected evaluation.samples = 1 with evaluation.temperature = 0, at which all samples of a prompt "
                f"are equal, got {self.samples}"
            )
        return self

    @property
    def sets(self) -> dict[str, DataSettings]:
        """The held-out sets that are evaluated during the run, by name."""
        return self.data if self.every else {}

    @property
    def told_k(self) -> tuple[int, ...]:
        """The values of k for which pass@k is reported, ascending."""
        return tuple(sorted({1, *(self.k or (self.samples,))}))

    def slots(self, max_num_seqs: int) -> int:
        """Evaluation's share of a worker's slots; 0 without an evaluation."""
        return max(1, int(max_num_seqs * SLOTS_SHARE)) if self.sets else 0

    def is_due(self, step: int) -> bool:
        """Whether the weights of this step are evaluated, if they are exported."""
        return bool(self.sets) and step % self.every == 0

    def newest_due(self, last: int, exported_every: int) -> int:
        """The newest step whose weights are evaluated, up to step ``last``, which is always exported."""
        exported = (step for step in range(last, -1, -1) if step == last or step % exported_every == 0)
        return next(step for step in exported if self.is_due(step))


def with_format_of_data(tree: dict[str, Any]) -> dict[str, Any]:
    """The settings' tree, in which each held-out set has the format and wording of ``[data]`` unless it has its own."""
    data, evaluation = tree.get("data"), tree.get("evaluation")
    held_out = evaluation.get("data") if isinstance(evaluation, dict) else None
    if not isinstance(data, dict) or not isinstance(evaluation, dict) or not isinstance(held_out, dict):
        return tree  # validation reports a wrong type
    sets = {name: _completed(each, data) if isinstance(each, dict) else each for name, each in held_out.items()}
    return {**tree, "evaluation": {**evaluation, "data": sets}}


def _completed(held_out: dict[str, Any], data: dict[str, Any]) -> dict[str, Any]:
    # Columns belong to a format: a set with a format of its own has that format's columns.
    has_columns = held_out.get("path") is not None and "format" not in held_out
    inherited = (*COLUMNS, *WORDING) if has_columns else WORDING
    return {key: data[key] for key in inherited if key in data} | held_out


SECTIONS = {"evaluation": HeldOutSettings}
