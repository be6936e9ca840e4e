"""``[dispatch]``: how orders are spread over workers, and when a worker counts as lost."""

from pathlib import Path
from typing import Annotated, Literal

from pydantic import Field

from streamrl.schemas.settings import Section


class DispatchSettings(Section):
    """``[dispatch]``."""

    strategy: Annotated[
        Literal["round_robin", "least_loaded", "lpt", "skewness_aware"],
        Field(
            description="round_robin: one worker after the other, and it stays so; least_loaded: the fewest predicted "
            "tokens per slot; lpt: that, longest first; skewness_aware: that, with own workers for the longest."
        ),
    ] = "skewness_aware"
    profile: Annotated[
        Path | None,
        Field(description="What `streamrl profile` measured of a worker; unset: the emulated curve, or a typical one."),
    ] = None
    profiles: Annotated[
        dict[str, Path],
        Field(
            description="Profiles of workers that differ from the others, by a worker's id or by its engine's name. "
            "How fast each worker is by its curve is learnt from what it delivers."
        ),
    ] = {}
    weight_sync_timeout_s: Annotated[
        float,
        Field(ge=0, description="With a staleness bound of 0 or 1: longest wait until all workers have new weights."),
    ] = 5.0
    repack: Annotated[
        bool,
        Field(
            description="Long completions that keep workers from new weights are moved together onto few of them. "
            "Needs generation.adopt = idle and generation.partial_trajectories = durable."
        ),
    ] = False
    repack_payback: Annotated[
        float,
        Field(ge=1, description="A move is made if it frees so many times the worker's time that its prefill takes."),
    ] = 16.0
    overcommit: Annotated[
        float,
        Field(ge=1.0, le=8.0, description="Sequences ordered per worker, as a multiple of what it samples at once."),
    ] = 1.25
    order_timeout_s: Annotated[
        float,
        Field(gt=0, description="An order that stands still for so long goes to another worker; doubles each time."),
    ] = 300.0
    max_attempts: Annotated[int, Field(ge=1, description="Times a group is ordered before it is given up.")] = 10
    orders_per_turn: Annotated[int, Field(ge=1, description="Orders sent between two looks at the topics.")] = 512
    poll_s: Annotated[float, Field(gt=0, le=5, description="Longest wait for news from the topics.")] = 0.25
    log_interval_s: Annotated[float, Field(gt=0, description="Time between two lines of progress in the log.")] = 10.0
