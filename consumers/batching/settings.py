"""``[batching]``: how large a micro-batch may be, and how its cost is estimated."""

from typing import Annotated, Literal

from pydantic import Field

from streamrl.schemas.settings import Section

Packing = Literal["padded", "varlen"]
"""``training.packing``: rows padded to the longest, or joined without padding."""


class BatchingSettings(Section):
    """``[batching]``."""

    token_budget: Annotated[
        int,
        Field(
            ge=1,
            description="Most tokens of a micro-batch, including padding if there is any (training.packing); a longer "
            "sample gets its own micro-batch.",
        ),
    ] = 16_384
    lookahead: Annotated[
        float,
        Field(
            ge=1,
            description="How many budgets of samples to hold before a micro-batch of similar lengths is cut from them; "
            "an idle trainer cuts one as soon as it holds one budget.",
        ),
    ] = 4.0
    fixed_cost_fraction: Annotated[
        float,
        Field(
            ge=0,
            le=1,
            description="Fixed cost of a micro-batch, in budgets: the smaller it is, the more small micro-batches with "
            "little padding are preferred to full ones with more.",
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
