"""``[coordinator]``, ``[scaling]`` and ``[relay]``: the coordinator's and the relay's settings."""

from pathlib import Path
from typing import Annotated

from pydantic import Field

from streamrl.schemas.settings import Section


class ScalingSettings(Section):
    """``[scaling]``: when workers join and leave, between run.workers and run.max_workers."""

    settle_steps: Annotated[
        int, Field(ge=0, description="Steps that are not judged after the number of workers changed.")
    ] = 1
    margin: Annotated[
        float,
        Field(ge=0, lt=1, description="A worker leaves if without it generation takes this share less than training."),
    ] = 0.15
    idle_steps: Annotated[int, Field(ge=1, description="Steps in a row for which that must hold.")] = 3


class CoordinatorSettings(Section):
    """``[coordinator]``."""

    finish_timeout_s: Annotated[
        float,
        Field(ge=0, description="After a restart: how long a finished run may still be continued before it is ended."),
    ] = 60.0
    relays: Annotated[
        tuple[str, ...],
        Field(
            description="Addresses of relays to begin with, before any is heard on the bus, and behind those that are; "
            "empty: the relay that `streamrl run` starts."
        ),
    ] = ()


class RelaySettings(Section):
    """``[relay]``."""

    host: Annotated[str, Field(description="Address to listen on.")] = "127.0.0.1"
    port: Annotated[int, Field(ge=0, le=65535, description="0: `streamrl run` picks a free one.")] = 0
    store: Annotated[
        Path | None,
        Field(
            description="Where this relay keeps the weights that it fetches from the relay before it, best in memory "
            "(/dev/shm). Not set: it serves the trainer's own store, from run.directory, and is the first of the chain."
        ),
    ] = None
    keep_versions: Annotated[int, Field(ge=1, description="Newest versions that stay in relay.store.")] = 2
    lease_s: Annotated[
        float,
        Field(ge=0, description="A version stays for this long after somebody last read of it, whatever is newer."),
    ] = 30.0
    site: Annotated[str, Field(description="Network around this host: the chain of relays goes site by site.")] = ""
    address: Annotated[
        str | None,
        Field(
            description="Where others reach this relay, as `http://name:port`; not set: at relay.host, or at this "
            "host's name if that is 0.0.0.0."
        ),
    ] = None
    max_bytes_per_s: Annotated[
        int,
        Field(ge=0, description="Most bytes of weights a second that it sends to other hosts together; 0: no bound."),
    ] = 0
    heartbeat_interval_s: Annotated[float, Field(gt=0, description="Between two heartbeats.")] = 1.0
    timeout_s: Annotated[
        float,
        Field(gt=0, description="Silence of an upstream after which another one is asked."),
    ] = 5.0
