"""``[dispatch]``: how orders are distributed over workers, and when an order counts as lost."""

from pathlib import Path
from typing import Annotated, Literal

from pydantic import Field

from streamrl.schemas.settings import Section


class DispatchSettings(Section):
    """``[dispatch]``."""

    strategy: Annotated[
        Literal["round_robin", "least_loaded", "lpt", "skewness_aware"],
        Field(
            description="round_robin: workers in turn, and never changed afterwards; least_loaded: the worker with the "
            "fewest predicted tokens per slot; lpt: as least_loaded, longest prompts first; skewness_aware: as lpt, "
            "with reserved workers for the longest."
        ),
    ] = "skewness_aware"
    profile: Annotated[
        Path | None,
        Field(description="A worker's profile, from `streamrl profile`; unset: the emulated curve, or a typical one."),
    ] = None
    profiles: Annotated[
        dict[str, Path],
        Field(
            description="Profiles of workers that differ from the others, by a worker's id or by its engine's name. "
            "Each worker's speed relative to its curve is learned from its completions."
        ),
    ] = {}
    repack: Annotated[
        bool,
        Field(
            description="Move long completions, which keep workers from adopting new weights, together onto few "
            "workers. Needs generation.adopt = idle and generation.partial_trajectories = durable."
        ),
    ] = False
    order_timeout_s: Annotated[
        float,
        Field(
            gt=0,
            description="Seconds without progress until an order goes to another worker; doubled with each attempt.",
        ),
    ] = 300.0
