"""``[kafka]``: where the broker is and how we talk to it. Names are Kafka's. Knows no client library."""

from pathlib import Path
from typing import Annotated, Literal

from pydantic import Field, SecretStr

from streamrl.schemas.settings import Section

SecurityProtocol = Literal["PLAINTEXT", "SSL", "SASL_PLAINTEXT", "SASL_SSL"]
SaslMechanism = Literal["PLAIN", "SCRAM-SHA-256", "SCRAM-SHA-512"]


class KafkaSettings(Section):
    """Every wait is bounded by one of these times; sizes are in bytes before compression."""

    bootstrap_servers: Annotated[
        str | None, Field(description="host:port, several separated by commas; none: an embedded broker is started.")
    ] = None
    compression_type: Annotated[
        Literal["none", "gzip", "snappy", "lz4", "zstd"],
        Field(
            description="zstd leaves half to a third of a trajectory's bytes, for less than 0.3 µs a token on either "
            "side; none saves that time."
        ),
    ] = "zstd"
    linger_ms: Annotated[float, Field(ge=0, description="How long a lone record waits for company.")] = 1.0
    max_batch_bytes: Annotated[
        int, Field(ge=1024, le=1 << 20, description="Most bytes sent at once per partition.")
    ] = 512 << 10
    max_in_flight_bytes: Annotated[
        int, Field(ge=1 << 20, description="Bytes a publisher holds that the broker has not yet; then it waits.")
    ] = 64 << 20
    connect_timeout_ms: Annotated[
        int, Field(ge=100, description="Until a broker that does not answer is an error.")
    ] = 4_000
    request_timeout_ms: Annotated[int, Field(ge=1000, description="Longest wait for the answer to a request.")] = 15_000
    delivery_timeout_ms: Annotated[
        int, Field(ge=1000, description="After this the outcome of a send is unknown; it may still arrive.")
    ] = 30_000
    transaction_timeout_ms: Annotated[
        int,
        Field(ge=1000, le=60_000, description="Longest transaction, and longest that a dead one holds readers up."),
    ] = 10_000
    stall_timeout_ms: Annotated[
        int,
        Field(ge=500, description="A reader or writer that stands still so long while the broker answers is replaced."),
    ] = 20_000
    max_client_restarts: Annotated[
        int, Field(ge=1, description="Replacements in a row that may fail to help; then the process ends.")
    ] = 3
    fetch_max_wait_ms: Annotated[
        int, Field(ge=1, description="How long the broker holds a read that finds too little.")
    ] = 100
    fetch_min_bytes: Annotated[
        int, Field(ge=1, description="Until so much is there, or that time is over, the broker holds a read.")
    ] = 1
    fetch_max_bytes: Annotated[int, Field(ge=1 << 20, description="Most bytes of one read.")] = 32 << 20
    max_partition_fetch_bytes: Annotated[int, Field(ge=1 << 16, description="The same, of one partition.")] = 4194304
    replication_factor: Annotated[
        int | None, Field(ge=1, description="Copies of each new topic; none: one per broker, at most three.")
    ] = None
    security_protocol: SecurityProtocol = "PLAINTEXT"
    sasl_mechanism: SaslMechanism = "PLAIN"
    sasl_plain_username: str | None = None
    sasl_plain_password: Annotated[
        SecretStr | None,
        Field(description="Also for SCRAM. Better given as STREAMRL_KAFKA__SASL_PLAIN_PASSWORD than in a file."),
    ] = None
    ssl_cafile: Annotated[Path | None, Field(description="Certificates to trust; none: the system's.")] = None
    ssl_certfile: Annotated[Path | None, Field(description="Our own certificate.")] = None
    ssl_keyfile: Path | None = None
    ssl_key_password: Annotated[
        SecretStr | None,
        Field(description="Its pass phrase. Better given as STREAMRL_KAFKA__SSL_KEY_PASSWORD."),
    ] = None

    @property
    def writer_stall_s(self) -> float:
        """How long a writer may get nothing acknowledged while the broker answers: one request may time out in it."""
        return (self.stall_timeout_ms + self.request_timeout_ms) / 1000
