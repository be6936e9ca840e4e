"""``[kafka]``: the broker's address, and how its clients connect. Names are Kafka's. Knows no client library."""

from pathlib import Path
from typing import Annotated, Literal

from pydantic import Field, SecretStr

from streamrl.schemas.settings import Section

SecurityProtocol = Literal["PLAINTEXT", "SSL", "SASL_PLAINTEXT", "SASL_SSL"]
SaslMechanism = Literal["PLAIN", "SCRAM-SHA-256", "SCRAM-SHA-512"]


class KafkaSettings(Section):
    """``[kafka]``: a slow network or broker needs longer times. ``streamrl/bus/kafka/limits.py`` has fixed limits."""

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
    request_timeout_ms: Annotated[
        int, Field(ge=1000, description="Most milliseconds to wait for the answer to a request.")
    ] = 15_000
    replication_factor: Annotated[
        int | None, Field(ge=1, description="Replicas of each new topic; none: one per broker, at most three.")
    ] = None
    security_protocol: Annotated[
        SecurityProtocol,
        Field(
            description="SSL encrypts the connection; SASL_PLAINTEXT logs in without encryption; SASL_SSL does both."
        ),
    ] = "PLAINTEXT"
    sasl_mechanism: Annotated[
        SaslMechanism,
        Field(description="How a client logs in, with SASL_PLAINTEXT or SASL_SSL; the broker must offer it."),
    ] = "PLAIN"
    sasl_plain_username: Annotated[str | None, Field(description="Name to log in with; also for SCRAM.")] = None
    sasl_plain_password: Annotated[
        SecretStr | None,
        Field(description="Password to log in with; also for SCRAM. Better set STREAMRL_KAFKA__SASL_PLAIN_PASSWORD."),
    ] = None
    ssl_cafile: Annotated[
        Path | None, Field(description="File of certificates to trust, in PEM format; none: the system's.")
    ] = None
    ssl_certfile: Annotated[
        Path | None,
        Field(description="The client's own certificate, in PEM format, if the broker identifies clients by theirs."),
    ] = None
    ssl_keyfile: Annotated[
        Path | None, Field(description="Private key of ssl_certfile; none: it is in the same file.")
    ] = None
    ssl_key_password: Annotated[
        SecretStr | None,
        Field(description="Pass phrase of ssl_keyfile. Better set by STREAMRL_KAFKA__SSL_KEY_PASSWORD than in a file."),
    ] = None
