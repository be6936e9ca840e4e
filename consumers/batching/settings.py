"""``[batching]``: how large a micro-batch may be."""

from typing import Annotated, Literal

from pydantic import Field

from streamrl.schemas.settings import Section

Packing = Literal["padded", "varlen", "shared"]
"""``training.packing``: rows padded to the longest, joined without padding, or joined with common prefixes once."""


class BatchingSettings(Section):
    """``[batching]``."""

    token_budget: Annotated[
        int,
        Field(
            ge=1,
            description="Most tokens that are computed in a micro-batch, including padding if there is any "
            "(training.packing); a longer sample gets its own micro-batch.",
        ),
    ] = 16_384
