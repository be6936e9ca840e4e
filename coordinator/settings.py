"""``[coordinator]``."""

from typing import Annotated

from pydantic import Field

from streamrl.schemas.settings import Section


class CoordinatorSettings(Section):
    """``[coordinator]``."""

    relays: Annotated[
        tuple[str, ...],
        Field(
            description="Addresses of relays to announce, after the relays that send heartbeats; "
            "empty: the relay that `streamrl run` starts."
        ),
    ] = ()
