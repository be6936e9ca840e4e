"""``[ingest]``: how much is read ahead, and when bad input stops the trainer."""

from typing import Annotated, Literal, Self

from pydantic import Field, model_validator

from schemas.settings import Section


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

    def should_pause(self, paused: bool, held_bytes: int, *, has_ready: bool) -> bool:
        """Whether reading is to pause: above the high mark, until below the low one, and only with a group ready."""
        if not has_ready:
            return False
        return held_bytes >= self.low_water_bytes if paused else held_bytes > self.high_water_bytes

    @model_validator(mode="after")
    def _ordered(self) -> Self:
        if self.low_water_bytes >= self.high_water_bytes:
            raise ValueError(
                f"ingest.low_water_bytes must be below ingest.high_water_bytes ({self.high_water_bytes}), "
                f"got {self.low_water_bytes}"
            )
        return self
