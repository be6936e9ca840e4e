"""``[batching]``: how large a micro-batch may be."""

from typing import Annotated

from pydantic import Field

from schemas.settings import Section


class BatchingSettings(Section):
    """``[batching]``."""

    token_budget: Annotated[
        int, Field(ge=1, description="Most tokens of a micro-batch, padding included; a longer sample stands alone.")
    ] = 16_384
    lookahead: Annotated[
        float, Field(ge=1, description="Budgets' worth of samples gathered before a micro-batch is cut by length.")
    ] = 1.5
