"""Times and sizes of Kafka clients that no user sets. Tests shorten them."""

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class ClientLimits:
    """Limits of the clients of one bus. Sizes are in bytes before compression.

    ``connect_timeout_s``: after that time, a broker that does not answer is an error. ``transaction_timeout_s``: the
    longest transaction, and the longest time for which an abandoned one blocks readers. ``stall_timeout_s``: time
    without progress, while the broker answers, after which a reader or writer is replaced. ``max_client_restarts``:
    replacements in a row without progress, then the process exits. ``linger_s``: how long a single record waits for
    others to join its batch. ``max_batch_bytes``: sent at once per partition. ``max_in_flight_bytes``: unacknowledged
    bytes that a publisher holds; then its callers wait. ``fetch_max_wait_ms``: how long the broker waits for a record
    before it answers a read. ``fetch_max_bytes`` and ``max_partition_fetch_bytes``: of one read, and of its share for
    one partition.
    """

    connect_timeout_s: float = 4.0
    transaction_timeout_s: float = 10.0
    stall_timeout_s: float = 20.0
    max_client_restarts: int = 3
    linger_s: float = 0.001
    max_batch_bytes: int = 512 << 10
    max_in_flight_bytes: int = 64 << 20
    fetch_max_wait_ms: int = 100
    fetch_max_bytes: int = 32 << 20
    max_partition_fetch_bytes: int = 4 << 20


LIMITS = ClientLimits()
"""The limits of every client outside of tests."""
