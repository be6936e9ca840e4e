"""Opens and closes aiokafka's clients within bounded times, and converts aiokafka's errors. Knows no topic.

Invariants: a client is either started within the connect time-out or discarded; stopping one takes a bounded time, even
if its broker is gone; errors of the library leave this folder only as errors of ``schemas.errors``.
"""

import asyncio
import contextlib
import math
import os
import ssl
import time
from collections.abc import Callable, Collection, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Protocol, TypeVar

import structlog
from aiokafka import AIOKafkaProducer, errors
from aiokafka.client import AIOKafkaClient
from aiokafka.conn import collect_hosts
from aiokafka.helpers import create_ssl_context
from aiokafka.protocol.metadata import MetadataRequest

from streamrl.bus.kafka.aiokafka_internals import (
    begin_at,
    check_login,
    connections_of,
    end_sender,
    inner_futures,
    limit_broker_waits,
)
from streamrl.bus.kafka.limits import LIMITS, ClientLimits
from streamrl.bus.kafka.settings import KafkaSettings
from streamrl.bus.waiting import end_tasks, to_its_end
from streamrl.schemas.errors import (
    BrokerError,
    BusError,
    BusUnavailable,
    DataLossRefused,
    SettingsError,
    StreamRLError,
    TopicMissing,
)
from streamrl.schemas.secrets import secret_value, variable_of

SCHEDSTAT = Path("/proc/self/schedstat")
STARVED = 0.5
"""Share of time without a processor above which this process, not the broker, is taken as the cause of a silence."""
LEAST_S = 0.5
# ``stop`` of a healthy client takes milliseconds. If the client's broker is gone, it may never return.
CLOSE_TIMEOUT_S = 5.0
FORCED_CLOSE_TIMEOUT_S = 3.0
SILENT_AFTER_S = 1.0
"""Seconds without an answer from a broker after which the next broker is asked too."""
START_ENDS_WITHIN_S = 0.5
"""Seconds that a cancelled start may take to end; a broker that answers at all does so within milliseconds."""
_NOT_THERE = (3, 5)
"""Error codes of an unknown topic, and of a new topic without a leader yet."""

# Errors of the library for no answer in time, as opposed to a refusal. A partition without a leader counts as no
# answer: its brokers are down or are just electing one.
_NO_ANSWER = (
    TimeoutError,
    OSError,
    errors.KafkaConnectionError,
    errors.NodeNotReadyError,
    errors.KafkaTimeoutError,
    errors.RequestTimedOutError,
    errors.NotLeaderForPartitionError,
    errors.LeaderNotAvailableError,
)

log = structlog.get_logger()


class BrokerUnreachable(BusUnavailable, BrokerError):
    """No broker answers at the address. Code catches it as ``BusUnavailable``; users see one line of advice."""


@contextlib.contextmanager
def converting_errors(doing: str) -> Iterator[None]:
    """Convert aiokafka's errors and time-outs to those of ``schemas.errors``; ``doing``: the action, for messages."""
    try:
        yield
    except errors.OffsetOutOfRangeError as error:
        # Special errors before general ones: most of these are KafkaErrors too.
        raise DataLossRefused(f"{doing}: the broker no longer holds that offset ({error})") from error
    except _NO_ANSWER as error:
        raise BusUnavailable(f"{doing}: no answer from the broker ({type(error).__name__}: {error})") from error
    except errors.KafkaError as error:
        raise BusError(f"{doing}: {error}") from error


BUSY = "this machine is so busy that the command gets no processor time; it continues as soon as there is some"


class ProcessorWait:
    """Measures how long this process was ready to run but had no processor, and so may have missed a broker's answer.

    The time counts from the object's creation, or from the last ``begin``.
    """

    def __init__(
        self, waited_s: Callable[[], float] | None = None, clock: Callable[[], float] = time.monotonic
    ) -> None:
        self._waited_s, self._clock = waited_s or processor_wait_s, clock
        self.begin()

    def begin(self) -> None:
        """Restart the measurement."""
        self._began_at, self._before = self._clock(), self._waited_s()

    @property
    def is_starved(self) -> bool:
        """Whether this process waited for a processor most of the time."""
        elapsed = self._clock() - self._began_at
        return elapsed >= LEAST_S and self._waited_s() - self._before > STARVED * elapsed


def processor_wait_s() -> float:
    """Seconds that this process's main thread has waited for a processor; 0 if the system does not count them."""
    try:
        # Time on a processor and time waiting for one, both in nanoseconds, and a count (Documentation/scheduler).
        return int(SCHEDSTAT.read_text().split()[1]) / 1e9
    except (OSError, ValueError, IndexError):
        return 0.0


@dataclass
class BrokerAvailability:
    """Whether the broker at ``address`` answers. Each change is logged once for all clients together.

    ``advice``: what a user can do about a broker that does not answer. ``answered_at``: time of the last answer, by
    ``time.monotonic``. ``processor`` distinguishes a silent broker from a process that had no time to hear it.
    """

    address: str = ""
    advice: str = ""
    is_away: bool = False
    answered_at: float = -math.inf
    processor: ProcessorWait = field(default_factory=ProcessorWait)

    @property
    def message(self) -> str:
        """The log message for a broker that stops answering."""
        said = "is not heard" if self.processor.is_starved else "does not answer"
        return f"the broker at {self.address} {said}" + (f"; {self.explanation}" if self.explanation else "")

    @property
    def explanation(self) -> str:
        """The cause or advice for the user; empty if there is none."""
        return BUSY if self.processor.is_starved else self.advice

    def report_silence(self, client_id: str, error: Exception, asked_at: float = math.inf) -> None:
        """Report that a client got no answer. ``asked_at``: when it asked, by ``time.monotonic``; default: just now.

        A question from before the last answer is ignored: it may have been lost with a broker that has returned since.
        """
        if not self.is_away and asked_at > self.answered_at:
            self.is_away = True
            log.warning(self.message, client_id=client_id, error=str(error))

    def report_answer(self, client_id: str) -> None:
        """Report that a client got an answer."""
        self.processor.begin()
        self.answered_at = time.monotonic()
        if self.is_away:
            self.is_away = False
            log.warning(f"the broker at {self.address} answers again", client_id=client_id)


def with_advice(error: StreamRLError, advice: str) -> str:
    """The error's text, with the advice if the error is that no broker answers."""
    silent = isinstance(error, BusUnavailable) and not isinstance(error, TopicMissing)
    return f"{error}; {advice}" if silent and advice else str(error)


def address_of(settings: KafkaSettings) -> str:
    """The broker's address.

    Raises:
        BrokerError: no address is set.
    """
    if not settings.bootstrap_servers:
        raise BrokerError("expected kafka.bootstrap_servers to name a broker, got none; set it to host:port")
    return settings.bootstrap_servers


def client_options(settings: KafkaSettings, client_id: str) -> dict[str, Any]:
    """Arguments for every client of aiokafka.

    Raises:
        SettingsError: a password or pass phrase is missing, or is only its mask.
        BrokerError: a certificate or its key cannot be read.
    """
    if settings.security_protocol.startswith("SASL"):
        for name in ("sasl_plain_username", "sasl_plain_password"):
            if getattr(settings, name) is None:
                raise SettingsError(
                    f'expected a kafka.{name} with kafka.security_protocol = "{settings.security_protocol}", got none; '
                    f"set {variable_of(('kafka', name))}"
                )
    return {
        "bootstrap_servers": address_of(settings),
        "client_id": client_id,
        "request_timeout_ms": settings.request_timeout_ms,
        "security_protocol": settings.security_protocol,
        "ssl_context": _ssl_context(settings),
        "sasl_mechanism": settings.sasl_mechanism,
        "sasl_plain_username": settings.sasl_plain_username,
        "sasl_plain_password": secret_value(settings.sasl_plain_password, "kafka", "sasl_plain_password"),
    }


def _ssl_context(settings: KafkaSettings) -> Any:
    if "SSL" not in settings.security_protocol.split("_"):
        return None
    pass_phrase = secret_value(settings.ssl_key_password, "kafka", "ssl_key_password")
    try:
        return create_ssl_context(
            cafile=settings.ssl_cafile,
            certfile=settings.ssl_certfile,
            keyfile=settings.ssl_keyfile,
            # Empty and not None: for None, OpenSSL would ask at the terminal and wait.
            password=pass_phrase or "",
        )
    except OSError as error:
        raise BrokerError(
            f"expected readable certificates in kafka.ssl_*, got {error}; check the paths and, for a key with a pass "
            f"phrase, {variable_of(('kafka', 'ssl_key_password'))}"
        ) from error


class Startable(Protocol):
    """A client of aiokafka."""

    async def start(self) -> None:
        """Connect."""
        ...


Client = TypeVar("Client", bound=Startable)


_reached: set[str] = set()
"""Addresses at which a broker has accepted this process. A later silence there is not the user's mistake."""


async def started(
    client: Client, settings: KafkaSettings, limits: ClientLimits = LIMITS, *, timeout_s: float | None = None
) -> Client:
    """Start a client: find a listening broker within the connect time-out, then start within ``timeout_s``.

    ``timeout_s``: default is the connect time-out again.

    Raises:
        BrokerUnreachable: nothing answers, or the listener is no usable Kafka broker.
        BrokerError: the broker refuses this client, or its certificate is not trusted.
        BusUnavailable: the same, if a broker at the address has accepted this process before.
    """
    address, connect_s = address_of(settings), limits.connect_timeout_s
    try:
        # Separate time-outs: a transactional producer may take longer to start than a listener to be found.
        async with asyncio.timeout(connect_s):
            answering = await _find_listener(address, settings)
        if (connections := connections_of(client)) is not None:
            begin_at(connections, answering)
            limit_broker_waits(connections, connect_s)
        async with asyncio.timeout(timeout_s or connect_s):
            await _start(client)
    except (TimeoutError, OSError, errors.KafkaError) as error:
        await discard(client)
        # Even if it refuses the password: a restarting broker knows its SCRAM users only after a moment.
        if address in _reached:
            raise BusUnavailable(f"expected the broker at {address} to answer again, got {_cause(error)}") from error
        if isinstance(error, _NOT_LET_IN):
            raise BrokerError(_refused(settings, error)) from error
        raise BrokerUnreachable(
            f"expected a Kafka broker at {address}, got {_cause(error)}; start one with `streamrl kafka up`, or check "
            "kafka.bootstrap_servers, kafka.security_protocol and the address that the broker advertises"
        ) from error
    except BaseException:
        await discard(client)
        raise
    _reached.add(address)
    return client


async def _start(client: Startable) -> None:
    """Start a client. A cancellation waits up to ``START_ENDS_WITHIN_S`` for the start to end.

    If aiokafka is cancelled before its first broker answers, it loses the open connection and later prints a warning to
    standard error.

    Raises:
        OSError: the broker that answered knows of none that is there.
    """
    try:
        await to_its_end(client.start(), START_ENDS_WITHIN_S)
    except AssertionError as error:  # aiokafka's, if a broker that just restarted lists none, not even itself
        raise ConnectionError("a list of no brokers, as just after a restart") from error


_NOT_LET_IN = (errors.SaslAuthenticationFailed, errors.UnsupportedSaslMechanismError, ssl.SSLCertVerificationError)


def _refused(settings: KafkaSettings, error: Exception) -> str:
    """One line about a broker that refuses the login, or whose certificate is not trusted; never with the password."""
    address, name = settings.bootstrap_servers, settings.sasl_plain_username
    match error:
        case ssl.SSLCertVerificationError():
            return (
                f"expected the broker at {address} to have a certificate that kafka.ssl_cafile vouches for, got: "
                f"{error.verify_message}; set kafka.ssl_cafile to the certificate of its signer"
            )
        case errors.UnsupportedSaslMechanismError():
            return (
                f'expected the broker at {address} to take kafka.sasl_mechanism = "{settings.sasl_mechanism}", got a '
                "refusal; set it to one that the broker has"
            )
        case _:
            return (
                f"expected the broker at {address} to let kafka.sasl_plain_username {name!r} in, got a refusal of its "
                f"password; set {variable_of(('kafka', 'sasl_plain_password'))} to the right one, or check "
                f'kafka.sasl_mechanism ("{settings.sasl_mechanism}")'
            )


def _cause(error: Exception) -> str:
    match error:
        case TimeoutError():
            return "no answer in time"
        case errors.KafkaError():
            return f"a listener that closes the connection ({type(error).__name__})"
        case OSError(errno=int() as number) if number > 0:
            return os.strerror(number).lower()
        case _:
            return str(error)


async def _find_listener(address: str, settings: KafkaSettings) -> str:
    """The address of a broker that listens and accepts the login; found before aiokafka's client tries.

    The client would log every refusal as an error and then raise one without the reason. Of several addresses, it would
    wait for the first one as long as for any answer.
    """
    try:
        hosts = [(host, port) for host, port, _ in collect_hosts(address)]  # in any order
    except ValueError as error:
        raise BrokerUnreachable(f"expected kafka.bootstrap_servers as host:port, got {address!r}") from error
    asking: dict[asyncio.Task[None], tuple[str, int]] = {}
    refusal: BaseException | None = None
    left = list(hosts)
    try:
        while left or asking:
            if left:
                host = left.pop()
                asking[asyncio.create_task(_try(host, settings, is_only=len(hosts) == 1))] = host
            # A broker that is silent for a moment may still answer. In the meantime, another one is asked too.
            patience_s = SILENT_AFTER_S if left else None
            done, _ = await asyncio.wait(asking, timeout=patience_s, return_when=asyncio.FIRST_COMPLETED)
            for task in done:
                host = asking.pop(task)
                if task.exception() is None:
                    return f"[{host[0]}]:{host[1]}" if ":" in host[0] else f"{host[0]}:{host[1]}"
                # Kept while the others are tried, because one broker of a cluster is enough.
                refusal = task.exception()
    finally:
        await end_tasks(asking)
    raise refusal or OSError(f"no address in {address!r}")


async def _try(host: tuple[str, int], settings: KafkaSettings, *, is_only: bool) -> None:
    """Return once the broker at ``host`` accepts the login.

    For the only address, a connection is enough if no login is needed or one has succeeded before. Of several brokers,
    only one that answers is useful, not a mere listener.
    """
    is_known = settings.security_protocol == "PLAINTEXT" or address_of(settings) in _reached
    if is_only and is_known:
        _, writer = await asyncio.open_connection(*host)
        writer.close()
        return
    options = client_options(settings, "streamrl-login")
    del options["bootstrap_servers"]
    await check_login(*host, options)


async def discard(client: Any, timeout_s: float = CLOSE_TIMEOUT_S) -> None:
    """Stop a client of any kind within the time-out; its errors are dropped.

    ``stop`` runs in its own task, because aiokafka lets a cancellation of its inner tasks escape from ``stop``, and
    swallows a cancellation of ``stop`` itself. A task that ignores its cancellation for ``FORCED_CLOSE_TIMEOUT_S`` is
    abandoned.
    """
    stopping = asyncio.create_task((getattr(client, "stop", None) or client.close)())
    stopping.add_done_callback(lambda task: task.cancelled() or task.exception())
    await asyncio.wait([stopping], timeout=timeout_s)
    stopping.cancel()
    await asyncio.wait([stopping], timeout=FORCED_CLOSE_TIMEOUT_S)


async def stop(producer: AIOKafkaProducer, patience_s: float) -> None:
    """Stop a producer. It gets ``patience_s`` seconds to deliver its batches, then its sender is ended by force."""
    futures = inner_futures(producer)
    # The limit of ``discard`` is longer than the patience, so that the sender is ended by force before ``stop`` is
    # abandoned.
    stopping = asyncio.create_task(discard(producer, FORCED_CLOSE_TIMEOUT_S + patience_s))
    await asyncio.wait([stopping], timeout=patience_s)
    futures |= inner_futures(producer)  # batches that were submitted in the meantime
    # Even if ``stop`` has returned: it leaves connections open if one of the producer's tasks had failed.
    await end_sender(producer)
    await stopping
    for future in futures | inner_futures(producer):
        if future.done() and not future.cancelled():
            future.exception()  # retrieved, because asyncio would log it otherwise


class _MetadataClient(AIOKafkaClient):  # type: ignore[misc]
    """A bare client with the ``start`` method of the others."""

    async def start(self) -> None:
        await self.bootstrap()


async def partition_counts(
    settings: KafkaSettings, client_id: str, topics: Collection[str] | None = None, limits: ClientLimits = LIMITS
) -> dict[str, int]:
    """Number of partitions of each existing topic of ``topics``; None: of every topic.

    Raises:
        BrokerUnreachable: no broker answers.
        BusError: the broker refuses.
    """
    client = await started(_MetadataClient(**client_options(settings, client_id)), settings, limits)
    try:
        return await partitions_seen_by(client, settings, topics, limits)
    finally:
        await discard(client)


async def partitions_seen_by(
    client: AIOKafkaClient,
    settings: KafkaSettings,
    topics: Collection[str] | None = None,
    limits: ClientLimits = LIMITS,
) -> dict[str, int]:
    """The same as ``partition_counts``, over the connections of a started client.

    Raises:
        BusUnavailable: no broker answers.
        BusError: the broker refuses.
    """
    doing = f"reading the topics of {address_of(settings)}"
    with converting_errors(doing):
        async with asyncio.timeout(limits.connect_timeout_s):
            if topics is not None:
                found = await topics_named(client, topics)
                return {name: len(partitions) for name, partitions in found.items()}
            try:
                cluster = await client.fetch_all_metadata()
            except errors.KafkaError as error:
                if type(error) is errors.KafkaError:  # aiokafka raises this if no broker answered
                    raise BusUnavailable(f"{doing}: no broker answers ({error})") from error
                raise
    return {topic: len(cluster.partitions_for_topic(topic)) for topic in cluster.topics()}


async def topics_named(client: AIOKafkaClient, names: Collection[str]) -> dict[str, list[dict[str, Any]]]:
    """The partitions of each topic of ``names`` that exists, with ``leader`` and ``replicas``; creates no topic.

    It asks only for these names, because a shared cluster may have tens of thousands of partitions.

    Raises:
        KafkaError: no broker answers, or this client may not see one of the topics.
    """
    request = MetadataRequest(sorted(names), allow_auto_topic_creation=False)
    refusal = errors.KafkaConnectionError(f"no broker answers at {client.hosts}")
    for broker in client.cluster.brokers():
        try:
            answer = await client.send(broker.nodeId, request)
        except errors.KafkaError as error:
            refusal = error
            continue
        topics = answer.to_object()["topics"]
        for topic in topics:
            if topic["error_code"] not in (0, *_NOT_THERE):
                raise errors.for_code(topic["error_code"])(topic["topic"])
        return {topic["topic"]: topic["partitions"] for topic in topics if not topic["error_code"]}
    raise refusal
