"""``[relay]``: how weights get from the trainer's store to the workers."""

from pathlib import Path
from typing import Annotated

from pydantic import Field

from streamrl.schemas.settings import Section


class RelaySettings(Section):
    """``[relay]``."""

    host: Annotated[str, Field(description="Address to listen on.")] = "127.0.0.1"
    port: Annotated[int, Field(ge=0, le=65535, description="0: `streamrl run` picks a free one.")] = 0
    store: Annotated[
        Path | None,
        Field(
            description="Directory for the weights that this relay fetches from the relay before it, best in memory "
            "(/dev/shm). Not set: it serves the trainer's own store in run.directory, as the first of the chain."
        ),
    ] = None
    keep_versions: Annotated[int, Field(ge=1, description="Number of newest versions that stay in relay.store.")] = 2
    lease_s: Annotated[
        float,
        Field(ge=0, description="Seconds that a version stays after it was last read, even if it is old."),
    ] = 30.0
    site: Annotated[str, Field(description="Name of this host's network: the chain of relays goes site by site.")] = ""
    address: Annotated[
        str | None,
        Field(
            description="Address at which others reach this relay, as `http://name:port`. Not set: relay.host, or this "
            "host's name if relay.host is 0.0.0.0."
        ),
    ] = None
    max_bytes_per_s: Annotated[
        int,
        Field(ge=0, description="Most bytes of weights per second to all other hosts together; 0: no limit."),
    ] = 0
    heartbeat_interval_s: Annotated[float, Field(gt=0, description="Seconds between two heartbeats.")] = 1.0
    timeout_s: Annotated[
        float,
        Field(gt=0, description="Seconds of silence after which another upstream is asked."),
    ] = 5.0
