"""``[kafka]``: the broker's address, and how its clients connect. Names are Kafka's. Knows no client library."""

from pathlib import Path
from typing import Annotated, Literal

from pydantic import Field, SecretStr

from streamrl.schemas.settings import Section

SecurityProtocol = Literal["PLAINTEXT", "SSL", "SASL_PLAINTEXT", "SASL_SSL"]
SaslMechanism = Literal["PLAIN", "SCRAM-SHA-256", "SCRAM-SHA-512"]


class KafkaSettings(Section):
    """These times bound every wait. Sizes are in bytes before compression."""

    bootstrap_servers: Annotated[
        str | None,
        Field(description="host:port, several separated by commas; none starts an embedded broker."),
    ] = None
    compression_type: Annotated[
        Literal["none", "gzip", "snappy", "lz4", "zstd"],
        Field(
            description="zstd shrinks a trajectory to a half or a third of its bytes and takes less than 0.3 µs per "
            "token on each side; none saves that time."
        ),
    ] = "zstd"
    linger_ms: Annotated[
        float, Field(ge=0, description="Milliseconds that a single record waits for others to join its batch.")
    ] = 1.0
    max_batch_bytes: Annotated[
        int, Field(ge=1024, le=1 << 20, description="Most bytes sent at once per partition.")
    ] = 512 << 10
    max_in_flight_bytes: Annotated[
        int,
        Field(ge=1 << 20, description="Most unacknowledged bytes that a publisher holds; then its callers wait."),
    ] = 64 << 20
    connect_timeout_ms: Annotated[
        int, Field(ge=100, description="Milliseconds after which a broker that does not answer is an error.")
    ] = 4_000
    request_timeout_ms: Annotated[
        int, Field(ge=1000, description="Most milliseconds to wait for the answer to a request.")
    ] = 15_000
    delivery_timeout_ms: Annotated[
        int,
        Field(ge=1000, description="Milliseconds after which a send's outcome is unknown; it may still arrive."),
    ] = 30_000
    transaction_timeout_ms: Annotated[
        int,
        Field(
            ge=1000,
            le=60_000,
            description="Most milliseconds of a transaction, and most for which an abandoned one blocks readers.",
        ),
    ] = 10_000
    stall_timeout_ms: Annotated[
        int,
        Field(
            ge=500,
            description="Milliseconds without progress, while the broker answers, after which a reader or writer is "
            "replaced.",
        ),
    ] = 20_000
    max_client_restarts: Annotated[
        int, Field(ge=1, description="Most replacements in a row without progress; then the process exits.")
    ] = 3
    fetch_max_wait_ms: Annotated[
        int, Field(ge=1, description="Milliseconds that the broker waits for fetch_min_bytes before it answers a read.")
    ] = 100
    fetch_min_bytes: Annotated[
        int, Field(ge=1, description="Bytes that the broker waits for, at most fetch_max_wait_ms, before it answers.")
    ] = 1
    fetch_max_bytes: Annotated[int, Field(ge=1 << 20, description="Most bytes of one read.")] = 32 << 20
    max_partition_fetch_bytes: Annotated[
        int, Field(ge=1 << 16, description="Most bytes of one read from one partition.")
    ] = 4194304
    replication_factor: Annotated[
        int | None, Field(ge=1, description="Replicas of each new topic; none: one per broker, at most three.")
    ] = None
    security_protocol: SecurityProtocol = "PLAINTEXT"
    sasl_mechanism: SaslMechanism = "PLAIN"
    sasl_plain_username: str | None = None
    sasl_plain_password: Annotated[
        SecretStr | None,
        Field(description="Also for SCRAM. Better set by STREAMRL_KAFKA__SASL_PLAIN_PASSWORD than in a file."),
    ] = None
    ssl_cafile: Annotated[Path | None, Field(description="File of certificates to trust; none: the system's.")] = None
    ssl_certfile: Annotated[Path | None, Field(description="The client's own certificate.")] = None
    ssl_keyfile: Path | None = None
    ssl_key_password: Annotated[
        SecretStr | None,
        Field(description="Pass phrase of ssl_keyfile. Better set by STREAMRL_KAFKA__SSL_KEY_PASSWORD than in a file."),
    ] = None

    @property
    def writer_stall_s(self) -> float:
        """Seconds that a writer may get no acknowledgement while the broker answers; room for one request time-out."""
        return (self.stall_timeout_ms + self.request_timeout_ms) / 1000
