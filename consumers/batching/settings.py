"""``[batching]``: how large a micro-batch may be."""

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
