"""``[ingest]``: how much is read ahead, and when bad input stops the trainer."""

from typing import Annotated, Literal, Self

from pydantic import AfterValidator, Field, model_validator

from streamrl.schemas.settings import LoopSettings, Section


def offsets_in(begin: str) -> dict[int, int]:
    """By partition, the first offsets that ``0=120,1=95`` asks for.

    Raises:
        ValueError: it is of another form.
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
    low_water_bytes: Annotated[int, Field(ge=0, description="Bytes below which reading goes on.")] = 256 << 20
    orphan_lineage: Annotated[
        Literal["train", "skip"],
        Field(description="What to do with samples of weights that a trainer crash orphaned."),
    ] = "train"
    sampling: Annotated[
        Literal["oldest", "freshest", "capped", "priority"],
        Field(
            description="trajectory_async: which whole groups a step takes first; oldest: those ordered first; "
            "freshest: those of the newest weights; capped: the oldest, none beyond ingest.staleness_cap; priority: "
            "those of the largest ingest.priority."
        ),
    ] = "oldest"
    staleness_cap: Annotated[
        int | None,
        Field(
            ge=0,
            description="capped: most optimizer steps a trained token may be old, below loop.max_staleness, by which "
            "prompts go out; groups beyond it are skipped as stale.",
        ),
    ] = None
    passed_over: Annotated[
        Literal["train", "skip"],
        Field(
            description="freshest, priority: what becomes of whole groups that others go before; train: each has a "
            "place kept in the last step that may train it; skip: none has, and they are skipped as stale behind it."
        ),
    ] = "train"
    priority: Annotated[
        str,
        Field(
            description="priority: absolute_advantage, or the import path of a pure function of a group's rewards and "
            "its trajectories; the largest goes first."
        ),
    ] = "absolute_advantage"
    attach_from: Annotated[
        str,
        Field(
            description="Of an attached instance without a checkpoint: where in the stream it begins; now, beginning, "
            "or the first offset by partition, as 0=120,1=95 (one that is left out begins with its oldest record)."
        ),
        AfterValidator(_place_in_the_stream),
    ] = "now"
    max_served_age: Annotated[
        int | None,
        Field(
            ge=0,
            description="Of an attached instance: oldest weights, in optimizer steps of the served policy behind those "
            "announced now, whose trajectories it trains; unset: any, corrected by importance weights.",
        ),
    ] = None
    other_behaviour: Annotated[
        Literal["correct", "skip"],
        Field(
            description="With instances or a split: what becomes of trajectories that another policy's weights "
            "sampled; correct: they are trained, with algorithm.importance_sampling_mode."
        ),
    ] = "correct"
    accept_loss: Annotated[
        bool, Field(description="Go on when the broker deleted records that were not read; each gap gets a skip row.")
    ] = False
    translate_offsets: Annotated[
        bool,
        Field(
            description="Go on with another cluster (a mirror, a restored backup), whose offsets are not those of the "
            "checkpoint: finished trajectories are found by their names; no effect on the cluster of the checkpoint."
        ),
    ] = False
    max_consecutive_poison: Annotated[
        int,
        Field(
            ge=1, description="Most records in a row that may be undecodable or have no reward, and prompts refused."
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
        """Whether another order than the oldest first decides which whole groups a step takes."""
        return loop.mode == "trajectory_async" and self.sampling in ("freshest", "priority")

    def max_age(self, loop: LoopSettings) -> int:
        """Most optimizer steps that a token may be old which the run's own trainer trains."""
        if loop.mode != "trajectory_async" or self.sampling != "capped" or self.staleness_cap is None:
            return loop.staleness_bound
        return min(loop.staleness_bound, self.staleness_cap)

    def should_pause(self, paused: bool, held_bytes: int, *, has_ready: bool) -> bool:
        """Whether reading is to pause: above the high mark, until below the low one, and only with a group ready."""
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
