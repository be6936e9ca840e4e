"""``[metrics]`` and ``[tracking]``. Imports no metrics library."""

from typing import Annotated, Literal

from pydantic import Field

from streamrl.schemas.settings import Section


class MetricsSettings(Section):
    """``[metrics]``: one Prometheus endpoint per process, ``http://host:port/metrics``."""

    port: Annotated[
        int,
        Field(
            ge=0,
            le=65_000,
            description="0: no endpoints. Otherwise the coordinator's port; relay +1, trainer +2, dispatcher +3, "
            "ranker +4, audit +5, gateway +6, evaluator +7, environments +8, sender +9, workers from +10 on. If a port "
            "is taken, the next free one. Prometheus finds them in <run.directory>/.prometheus/*.json.",
        ),
    ] = 0
    host: Annotated[str, Field(description="Address to listen on; 0.0.0.0 in containers.")] = "127.0.0.1"


class TrackingSettings(Section):
    """``[tracking]``: the metrics of every step, for experiment trackers."""

    to: Annotated[
        tuple[Literal["tensorboard", "wandb", "trackio"], ...],
        Field(
            description="Trackers: tensorboard, wandb, trackio; each needs its package. They write files to "
            "runs/<name>/tracking/, and nothing leaves the machine."
        ),
    ] = ()
    project: Annotated[str, Field(min_length=1, description="The run's project in the trackers.")] = "streamrl"
