"""``[ingest]``: how far the reader reads ahead, which samples are trained, and when bad input stops the trainer."""

from typing import Annotated, Literal, Self

from pydantic import AfterValidator, Field, model_validator

from streamrl.schemas.settings import LoopSettings, Section


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


class IngestSettings(Section):
    """``[ingest]``."""

    max_poll_records: Annotated[int, Field(ge=1, description="Most records taken from the bus at once.")] = 500
    high_water_bytes: Annotated[
        int, Field(ge=1, description="Bytes of trajectories held in memory above which reading pauses.")
    ] = 512 << 20
    low_water_bytes: Annotated[int, Field(ge=0, description="Bytes below which reading resumes.")] = 256 << 20
    orphan_lineage: Annotated[
        Literal["train", "skip"],
        Field(description="What to do with samples of weights that were lost when the trainer crashed."),
    ] = "train"
    sampling: Annotated[
        Literal["oldest", "freshest", "capped", "priority"],
        Field(
            description="In trajectory_async, which complete groups a step takes first. oldest: ordered first; "
            "freshest: sampled by the newest weights; capped: the oldest, but none beyond ingest.staleness_cap; "
            "priority: largest ingest.priority."
        ),
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
            description="With freshest or priority: what happens to complete groups that are not chosen. train: each "
            "gets a place in the last step that may train it; skip: they may miss that step, and are skipped as stale."
        ),
    ] = "train"
    priority: Annotated[
        str,
        Field(
            description="With priority: absolute_advantage, or the import path of a pure function of a group's rewards "
            "and trajectories; the largest value goes first."
        ),
    ] = "absolute_advantage"
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
            description="Oldest weights whose trajectories an attached instance trains, in optimizer steps of the "
            "served policy before its newest announced weights; unset: any age, corrected by importance weights.",
        ),
    ] = None
    other_behaviour: Annotated[
        Literal["correct", "skip"],
        Field(
            description="With instances or a split: what to do with trajectories that another policy's weights "
            "sampled. correct: train them, with algorithm.importance_sampling_mode."
        ),
    ] = "correct"
    accept_loss: Annotated[
        bool, Field(description="Continue if the broker deleted records that were not read; each gap gets a skip row.")
    ] = False
    translate_offsets: Annotated[
        bool,
        Field(
            description="Continue on another cluster (a mirror, a restored backup), whose offsets differ from the "
            "checkpoint's: finished trajectories are found by their names. No effect on the checkpoint's own cluster."
        ),
    ] = False
    max_consecutive_poison: Annotated[
        int,
        Field(
            ge=1,
            description="Most records in a row that may be undecodable or lack a reward, and prompts refused.",
        ),
    ] = 50
    max_undecodable_share: Annotated[
        float, Field(gt=0, le=1, description="Largest share of undecodable records among the last 1000.")
    ] = 0.01
    max_unrewarded_share: Annotated[
        float, Field(gt=0, le=1, description="Largest share of failed rewards among the last 1000 trajectories.")
    ] = 0.2

    max_refused_share: Annotated[
        float, Field(gt=0, le=1, description="Largest share of prompts that no worker can sample, among the last 1000.")
    ] = 0.9

    def chooses(self, loop: LoopSettings) -> bool:
        """Whether a step takes complete groups in another order than the oldest first."""
        return loop.mode == "trajectory_async" and self.sampling in ("freshest", "priority")

    def max_age(self, loop: LoopSettings) -> int:
        """The largest age, in optimizer steps, of a token that the run's own trainer trains."""
        if loop.mode != "trajectory_async" or self.sampling != "capped" or self.staleness_cap is None:
            return loop.staleness_bound
        return min(loop.staleness_bound, self.staleness_cap)

    def should_pause(self, paused: bool, held_bytes: int, *, has_ready: bool) -> bool:
        """Whether reading should pause: above the high mark, until below the low one, and only if a group is ready."""
        if not has_ready:
            return False
        return held_bytes >= self.low_water_bytes if paused else held_bytes > self.high_water_bytes

    @model_validator(mode="after")
    def _ordered(self) -> Self:
        if self.sampling == "capped" and self.staleness_cap is None:
            raise ValueError("ingest.staleness_cap must be set, below loop.max_staleness, with ingest.sampling capped")
        if self.low_water_bytes >= self.high_water_bytes:
            raise ValueError(
                f"ingest.low_water_bytes must be below ingest.high_water_bytes ({self.high_water_bytes}), "
                f"got {self.low_water_bytes}"
            )
        return self
