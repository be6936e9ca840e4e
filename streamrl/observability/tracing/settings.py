"""``[telemetry]``. Imports no tracing library."""

from typing import Annotated, Literal

from pydantic import AfterValidator, Field

from streamrl.schemas.secrets import without_credentials
from streamrl.schemas.settings import Section


class TelemetrySettings(Section):
    """``[telemetry]``: traces that follow a prompt through Kafka to its optimizer step and the resulting weights."""

    traces: Annotated[
        Literal["off", "file", "otlp"],
        Field(
            description="file: OTLP-JSON lines in runs/<name>/traces/, for `streamrl trace`; otlp: sent to a collector."
        ),
    ] = "off"
    endpoint: Annotated[
        str | None,
        Field(
            pattern=r"^https?://",
            description="OTLP/HTTP collector; unset: OTEL_EXPORTER_OTLP_ENDPOINT, else http://localhost:4318.",
        ),
        AfterValidator(without_credentials),
    ] = None
    sample_ratio: Annotated[
        float,
        Field(
            ge=0,
            le=1,
            description="Share of groups and requests that are traced; dispatcher and gateway decide for all roles.",
        ),
    ] = 1.0
