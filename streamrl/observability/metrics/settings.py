"""``[metrics]`` and ``[tracking]``. Knows no library."""

from typing import Annotated, Literal

from pydantic import Field

from streamrl.schemas.settings import Section


class MetricsSettings(Section):
    """``[metrics]``: one Prometheus endpoint for each process, ``http://host:port/metrics``."""

    port: Annotated[
        int,
        Field(
            ge=0,
            le=65_000,
            description="0: no endpoints. Else the coordinator's port; relay +1, trainer +2, dispatcher +3, ranker "
            "+4, audit +5, gateway +6, evaluator +7, environments +8, sender +9, workers from +10 on; the next free "
            "one if taken. <run.directory>/.prometheus/*.json tell Prometheus.",
        ),
    ] = 0
    host: Annotated[str, Field(description="Address to listen on; 0.0.0.0 in containers.")] = "127.0.0.1"
    lag_interval_s: Annotated[
        float, Field(ge=1, description="How often the coordinator asks the broker for consumer lag.")
    ] = 10.0


class TrackingSettings(Section):
    """``[tracking]``: the metrics of every step, also for what has its own page for them."""

    to: Annotated[
        tuple[Literal["tensorboard", "wandb", "trackio"], ...],
        Field(description="Each needs its package. Files only: runs/<name>/tracking/; nothing leaves this machine."),
    ] = ()
    project: Annotated[str, Field(min_length=1, description="Project under which trackers file the run.")] = "streamrl"
