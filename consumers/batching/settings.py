"""``[batching]``: how large a micro-batch may be, and what is taken to be costly in it."""

from typing import Annotated, Literal

from pydantic import Field

from streamrl.schemas.settings import Section

Packing = Literal["padded", "varlen"]
"""``training.packing``: rows padded to the longest, or one behind the other without padding."""


class BatchingSettings(Section):
    """``[batching]``."""

    token_budget: Annotated[
        int,
        Field(
            ge=1,
            description="Most tokens of a micro-batch, padding included where there is any (training.packing); a "
            "longer sample stands alone.",
        ),
    ] = 16_384
    lookahead: Annotated[
        float,
        Field(
            ge=1,
            description="Budgets' worth of samples among which a micro-batch is chosen by length while more samples "
            "are there; a trainer with nothing to do takes what it has, from one budget's worth on.",
        ),
    ] = 4.0
    fixed_cost_fraction: Annotated[
        float,
        Field(
            ge=0,
            le=1,
            description="Fixed cost of a micro-batch, in budgets: the less it is, the more a small micro-batch without "
            "padding is preferred to a full one with it.",
        ),
    ] = 0.03
    attention_cost_fraction: Annotated[
        float,
        Field(
            ge=0,
            le=1,
            description="Share of a sequence's cost that grows with the square of its length, as attention's does, "
            "in a sequence as long as the token budget.",
        ),
    ] = 0.2
