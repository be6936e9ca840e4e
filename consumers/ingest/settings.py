"""``[ingest]``: which samples are trained, in which order, and how many failed rewards stop the trainer."""

from typing import Annotated, Literal, Self

from pydantic import AfterValidator, Field, model_validator

from streamrl.schemas.settings import LoopSettings, Section

ORDERS = ("oldest", "freshest", "capped", "absolute_advantage")
"""The built-in values of ``ingest.sampling``."""


def offsets_in(begin: str) -> dict[int, int]:
    """First offsets by partition, parsed from a text such as ``0=120,1=95``.

    Raises:
        ValueError: the text has another form.
    """
    pairs = [part.split("=") for part in begin.split(",")]
    if not all(len(pair) == 2 and all(number.isascii() and number.isdigit() for number in pair) for pair in pairs):
        raise ValueError(f"expected now, beginning, or offsets by partition such as 0=120,1=95, got {begin!r}")
    offsets = {int(partition): int(offset) for partition, offset in pairs}
    if len(offsets) < len(pairs):
        raise ValueError(f"expected each partition once, got {begin!r}")
    return offsets


def _place_in_the_stream(begin: str) -> str:
    if begin not in ("now", "beginning"):
        offsets_in(begin)
    return begin


def _known_order(sampling: str) -> str:
    if sampling not in ORDERS and ":" not in sampling:
        raise ValueError(f"expected one of {', '.join(ORDERS)}, or package.module:function, got {sampling!r}")
    return sampling


class IngestSettings(Section):
    """``[ingest]``."""

    sampling: Annotated[
        str,
        Field(
            description="In trajectory_async, which complete groups a step takes first. oldest: ordered first; "
            "freshest: sampled by the newest weights; capped: the oldest, but none beyond ingest.staleness_cap; "
            "absolute_advantage: the largest advantages; or package.module:function, a pure function of a group's "
            "rewards and trajectories, whose largest value goes first."
        ),
        AfterValidator(_known_order),
    ] = "oldest"
    staleness_cap: Annotated[
        int | None,
        Field(
            ge=0,
            description="With capped: largest age of a trained token in optimizer steps; older groups are skipped as "
            "stale. It must be below loop.max_staleness, which still decides when prompts are sent.",
        ),
    ] = None
    passed_over: Annotated[
        Literal["train", "skip"],
        Field(
            description="Unless the oldest go first: what happens to complete groups that are not chosen. train: each "
            "gets a place in the last step that may train it; skip: they may miss that step, and are skipped as stale."
        ),
    ] = "train"
    attach_from: Annotated[
        str,
        Field(
            description="Where in the stream an attached instance without a checkpoint starts: now, beginning, or "
            "first offsets by partition, as 0=120,1=95 (partitions that are left out start with their oldest record)."
        ),
        AfterValidator(_place_in_the_stream),
    ] = "now"
    max_served_age: Annotated[
        int | None,
        Field(
            ge=0,
            description="An attached instance skips trajectories whose weights are more than this many served steps "
            "older than the newest announced ones; unset: it trains any age, with importance weights.",
        ),
    ] = None
    accept_loss: Annotated[
        bool, Field(description="Continue if the broker deleted unread records; each gap gets a skip record.")
    ] = False
    translate_offsets: Annotated[
        bool,
        Field(
            description="Continue on another cluster (a mirror, a restored backup), whose offsets differ from the "
            "checkpoint's: finished trajectories are found by their names. No effect on the checkpoint's own cluster."
        ),
    ] = False
    on_change: Annotated[
        Literal["skip", "train"],
        Field(
            description="In a run that is continued after prompts, reward code, sampling or the model changed: what "
            "happens to trajectories that were sampled before. skip: they are skipped as task_changed, because they "
            "were rewarded for another task; train: they are trained. After other changes they are always trained."
        ),
    ] = "skip"
    max_unrewarded_share: Annotated[
        float, Field(gt=0, le=1, description="Share of failed rewards in the last 1000 trajectories that stops a run.")
    ] = 0.2

    @property
    def passes_over(self) -> bool:
        """Whether a step may take a group before an older one."""
        return self.sampling not in ("oldest", "capped")

    def chooses(self, loop: LoopSettings) -> bool:
        """Whether a step takes complete groups in another order than the oldest first."""
        return loop.mode == "trajectory_async" and self.passes_over

    def max_age(self, loop: LoopSettings) -> int:
        """The largest age, in optimizer steps, of a token that the run's own trainer trains."""
        if loop.mode != "trajectory_async" or self.sampling != "capped" or self.staleness_cap is None:
            return loop.staleness_bound
        return min(loop.staleness_bound, self.staleness_cap)

    @model_validator(mode="after")
    def _ordered(self) -> Self:
        if self.sampling == "capped" and self.staleness_cap is None:
            raise ValueError("ingest.staleness_cap must be set, below loop.max_staleness, with ingest.sampling capped")
        return self
