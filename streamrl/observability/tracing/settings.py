"""``[telemetry]``. Imports no tracing library."""

import os
from typing import Annotated, Literal

from pydantic import Field

from streamrl.schemas.errors import SettingsError
from streamrl.schemas.settings import Section

RATIO = "OTEL_TRACES_SAMPLER_ARG"
"""OpenTelemetry's variable for the share of traces that are recorded. Its other variables name the collector."""


class TelemetrySettings(Section):
    """``[telemetry]``: traces that follow a prompt through Kafka to its optimizer step and the resulting weights."""

    traces: Annotated[
        Literal["off", "file", "otlp"],
        Field(
            description="file: OTLP-JSON lines in runs/<name>/traces/, for `streamrl trace`; otlp: sent to the "
            "collector that OTEL_EXPORTER_OTLP_ENDPOINT names. OTEL_TRACES_SAMPLER_ARG says which share."
        ),
    ] = "off"


def sampled_share() -> float:
    """The share of groups and requests that are traced: all, unless the environment variable ``RATIO`` says less.

    Raises:
        SettingsError: the variable is no number from 0 to 1.
    """
    given = os.environ.get(RATIO) or "1"
    try:
        share = float(given)
    except ValueError:
        share = -1.0
    if not 0.0 <= share <= 1.0:
        raise SettingsError(f"expected a number from 0 to 1 in the environment variable {RATIO}, got {given!r}")
    return share
