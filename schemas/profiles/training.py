"""How long the acts of a trainer take, in seconds."""

from typing import Annotated

from pydantic import Field

from schemas.settings import Section

Seconds = Annotated[float, Field(ge=0)]


class TrainingCosts(Section):
    """Forward and backward cost per micro-batch, the other acts once each time; measured or assumed."""

    forward_backward_s_per_token: Annotated[
        Seconds, Field(description="Seconds for each token of prompts and completions in a micro-batch.")
    ] = 1e-5
    forward_backward_s_per_squared_token: Annotated[
        Seconds, Field(description="Seconds for each square of a sequence's length, as attention takes.")
    ] = 0.0
    forward_backward_s_per_micro_batch: Annotated[Seconds, Field(description="Seconds for each micro-batch.")] = 0.0
    padding_counts: Annotated[
        bool, Field(description="Padding costs what tokens cost; else only tokens do, as with variable lengths.")
    ] = False
    optimizer_step_s: Annotated[Seconds, Field(description="Seconds of one optimizer step.")] = 0.0
    export_s: Annotated[Seconds, Field(description="Seconds to put weights into the weights store.")] = 0.0
    checkpoint_s: Annotated[Seconds, Field(description="Seconds to write a checkpoint.")] = 0.0
