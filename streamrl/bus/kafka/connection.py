"""Opens and closes aiokafka's clients within bounds, and says aiokafka's errors in ours. Knows no topic of ours.

Invariants: a client is either started within the connect time-out or discarded; ending one takes a bounded time, also
where its broker is gone; no error of the library leaves this folder but as one of ``schemas.errors``.
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
    ask_others_soon,
    begin_at,
    connections_of,
    end_sender,
    inner_futures,
    visit,
)
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
from streamrl.schemas.secrets import revealed, variable_of

SCHEDSTAT = Path("/proc/self/schedstat")
STARVED = 0.5
"""Share of the time without a processor from which a silence is ours rather than the broker's."""
LEAST_S = 0.5
# ``stop`` of a healthy client takes milliseconds. It may wait for ever for one whose broker is gone.
CLOSE_TIMEOUT_S = 5.0
FORCED_CLOSE_TIMEOUT_S = 3.0
SILENT_AFTER_S = 1.0
"""Without an answer of a broker, and the next one is asked as well."""
START_ENDS_WITHIN_S = 0.5
"""For a start that is not wanted any more; a broker that answers at all does so within milliseconds."""
_NOT_THERE = (3, 5)
"""Codes of a topic that is unknown, and of one that is just being made and has no leader yet."""

# What the library raises where no broker answered in time, as opposed to one that refuses. A partition without a leader
# is the same for us: its brokers are away or just choosing.
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
    """No broker answers at the address: for a room the bus is unavailable, for a user it is one line to act on."""


@contextlib.contextmanager
def our_errors(doing: str) -> Iterator[None]:
    """Raise aiokafka's errors and time-outs as ours, saying what was being done."""
    try:
        yield
    except errors.OffsetOutOfRangeError as error:
        # From the special to the general: most of these are KafkaErrors too.
        raise DataLossRefused(f"{doing}: the broker no longer keeps that offset ({error})") from error
    except _NO_ANSWER as error:
        raise BusUnavailable(f"{doing}: no answer from the broker ({type(error).__name__}: {error})") from error
    except errors.KafkaError as error:
        raise BusError(f"{doing}: {error}") from error


BUSY = "this machine is so busy that the command gets no processor time; it goes on by itself when there is some"


class ProcessorWait:
    """How long this process was ready to run and had no processor: why it may not have heard what a broker answered.

    Measured since it was made, or since ``begin``.
    """

    def __init__(
        self, waited_s: Callable[[], float] | None = None, clock: Callable[[], float] = time.monotonic
    ) -> None:
        self._waited_s, self._clock = waited_s or waited_by_us, clock
        self.begin()

    def begin(self) -> None:
        """Measure from now on."""
        self._began_at, self._before = self._clock(), self._waited_s()

    @property
    def is_starved(self) -> bool:
        """Whether this process waited for a processor most of the time."""
        elapsed = self._clock() - self._began_at
        return elapsed >= LEAST_S and self._waited_s() - self._before > STARVED * elapsed


def waited_by_us() -> float:
    """Seconds since this process began, of its main thread; 0 where the system does not count them."""
    try:
        # Time on a processor and time in line for one, both in nanoseconds, and a count (Documentation/scheduler).
        return int(SCHEDSTAT.read_text().split()[1]) / 1e9
    except (OSError, ValueError, IndexError):
        return 0.0


@dataclass
class BrokerAvailability:
    """Whether the broker at ``address`` answers: logged once when that changes, however many clients ask.

    ``advice``: what a user can do about a broker that does not answer. ``answered_at``: of the last answer, by
    ``time.monotonic``. ``processor``: tells a silent broker from a
    process that had no chance to hear it.
    """

    address: str = ""
    advice: str = ""
    is_away: bool = False
    answered_at: float = -math.inf
    processor: ProcessorWait = field(default_factory=ProcessorWait)

    @property
    def message(self) -> str:
        """What is logged when it stops answering."""
        said = "is not heard" if self.processor.is_starved else "does not answer"
        return f"the broker at {self.address} {said}" + (f"; {self.explanation}" if self.explanation else "")

    @property
    def explanation(self) -> str:
        """What a user can make of it; empty if nothing is known."""
        return BUSY if self.processor.is_starved else self.advice

    def report_silence(self, client_id: str, error: Exception, asked_at: float = math.inf) -> None:
        """A client got no answer. ``asked_at``: when it asked, by ``time.monotonic``; not given: just now.

        A question from before the last answer may have been lost with a broker that is back by now.
        """
        if not self.is_away and asked_at > self.answered_at:
            self.is_away = True
            log.warning(self.message, client_id=client_id, error=str(error))

    def report_answer(self, client_id: str) -> None:
        """A client got an answer."""
        self.processor.begin()
        self.answered_at = time.monotonic()
        if self.is_away:
            self.is_away = False
            log.warning(f"the broker at {self.address} answers again", client_id=client_id)


def advised(error: StreamRLError, advice: str) -> str:
    """The error's text; if it says that no broker answers, with the advice."""
    silent = isinstance(error, BusUnavailable) and not isinstance(error, TopicMissing)
    return f"{error}; {advice}" if silent and advice else str(error)


def address_of(settings: KafkaSettings) -> str:
    """The broker's address.

    Raises:
        BrokerError: none is set.
    """
    if not settings.bootstrap_servers:
        raise BrokerError("expected kafka.bootstrap_servers to name a broker, got none; set it to host:port")
    return settings.bootstrap_servers


def client_options(settings: KafkaSettings, client_id: str) -> dict[str, Any]:
    """Arguments that every client of aiokafka takes.

    Raises:
        SettingsError: a password or pass phrase is missing, or only its mask is there.
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
        "sasl_plain_password": revealed(settings.sasl_plain_password, "kafka", "sasl_plain_password"),
    }


def _ssl_context(settings: KafkaSettings) -> Any:
    if "SSL" not in settings.security_protocol.split("_"):
        return None
    pass_phrase = revealed(settings.ssl_key_password, "kafka", "ssl_key_password")
    try:
        return create_ssl_context(
            cafile=settings.ssl_cafile,
            certfile=settings.ssl_certfile,
            keyfile=settings.ssl_keyfile,
            # An empty one in place of none, for which OpenSSL would ask at the terminal, and wait.
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
"""Addresses at which a broker let this process in: if it is silent later, that is not the user's mistake."""


async def started(client: Client, settings: KafkaSettings, timeout_s: float | None = None) -> Client:
    """Start a client within the connect time-out, or another one once somebody listens.

    Raises:
        BrokerUnreachable: nothing answers, or not as a Kafka broker that lets us in.
        BusUnavailable: the same, where a broker answered this process before.
    """
    address = address_of(settings)
    try:
        # A time-out each: a transactional producer may take longer to start than a listener to be found.
        async with asyncio.timeout(settings.connect_timeout_ms / 1000):
            answering = await _find_listener(address, settings)
        if (connections := connections_of(client)) is not None:
            begin_at(connections, answering)
            ask_others_soon(connections, settings.connect_timeout_ms / 1000)
        async with asyncio.timeout(timeout_s or settings.connect_timeout_ms / 1000):
            await _start(client)
    except (TimeoutError, OSError, errors.KafkaError) as error:
        await discard(client)
        # Even one that refuses our password: a broker that starts again knows its SCRAM users only after a moment.
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
    """Start it; a cancellation waits a moment for what is under way.

    aiokafka forgets the connection to its first broker when it is cancelled before the answer, and complains of it
    later, on standard error.
    """
    await to_its_end(client.start(), START_ENDS_WITHIN_S)


_NOT_LET_IN = (errors.SaslAuthenticationFailed, errors.UnsupportedSaslMechanismError, ssl.SSLCertVerificationError)


def _refused(settings: KafkaSettings, error: Exception) -> str:
    """One line about a broker that answers and does not let us in, or that we do not trust; never with the password."""
    address, name = settings.bootstrap_servers, settings.sasl_plain_username
    match error:
        case ssl.SSLCertVerificationError():
            return (
                f"expected the broker at {address} to have a certificate that kafka.ssl_cafile vouches for, got: "
                f"{error.verify_message}; set kafka.ssl_cafile to the certificate of who signed it"
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
            return f"a listener that ends the conversation ({type(error).__name__})"
        case OSError(errno=int() as number) if number > 0:
            return os.strerror(number).lower()
        case _:
            return str(error)


async def _find_listener(address: str, settings: KafkaSettings) -> str:
    """Find one broker that listens, and lets us in, before aiokafka's client tries; where it is.

    The client would log every refusal as an error of its own, and then raise one without the reason; and it would wait
    for the first of several addresses as long as for any answer.
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
            # Who is silent for a moment may answer still; meanwhile another is asked as well.
            patience_s = SILENT_AFTER_S if left else None
            done, _ = await asyncio.wait(asking, timeout=patience_s, return_when=asyncio.FIRST_COMPLETED)
            for task in done:
                host = asking.pop(task)
                if task.exception() is None:
                    return f"[{host[0]}]:{host[1]}" if ":" in host[0] else f"{host[0]}:{host[1]}"
                # Kept while the others are tried: one broker of a cluster is enough.
                refusal = task.exception()
    finally:
        await end_tasks(asking)
    raise refusal or OSError(f"no address in {address!r}")


async def _try(host: tuple[str, int], settings: KafkaSettings, *, is_only: bool) -> None:
    """Return once the broker there lets us in; of several only one that answers is of use, and not a mere listener."""
    is_known = settings.security_protocol == "PLAINTEXT" or address_of(settings) in _reached
    if is_only and is_known:
        _, writer = await asyncio.open_connection(*host)
        writer.close()
        return
    options = client_options(settings, "streamrl-login")
    del options["bootstrap_servers"]
    await visit(*host, options)


async def discard(client: Any, timeout_s: float = CLOSE_TIMEOUT_S) -> None:
    """Stop a client of any kind within the time-out; its errors interest nobody any more.

    In a task of its own, because aiokafka lets a cancellation of its inner tasks escape from ``stop``, and swallows one
    of ``stop`` itself: what ignores its end for another ``FORCED_CLOSE_TIMEOUT_S`` is left to itself.
    """
    stopping = asyncio.create_task((getattr(client, "stop", None) or client.close)())
    stopping.add_done_callback(lambda task: task.cancelled() or task.exception())
    await asyncio.wait([stopping], timeout=timeout_s)
    stopping.cancel()
    await asyncio.wait([stopping], timeout=FORCED_CLOSE_TIMEOUT_S)


async def stop(producer: AIOKafkaProducer, patience_s: float) -> None:
    """Stop a producer within ``patience_s``, delivering what it still has; after that, by force."""
    futures = inner_futures(producer)
    # Its own bound lies beyond the patience, so that ending the sender by force still
    # comes before giving up on ``stop``.
    stopping = asyncio.create_task(discard(producer, FORCED_CLOSE_TIMEOUT_S + patience_s))
    await asyncio.wait([stopping], timeout=patience_s)
    futures |= inner_futures(producer)  # batches that were submitted meanwhile
    # Also where ``stop`` has returned: it leaves connections open where one of the producer's tasks had failed.
    await end_sender(producer)
    await stopping
    for future in futures | inner_futures(producer):
        if future.done() and not future.cancelled():
            future.exception()  # looked at, or asyncio would log that nobody did


class _MetadataClient(AIOKafkaClient):  # type: ignore[misc]
    """A bare client that starts and stops as the others do."""

    async def start(self) -> None:
        await self.bootstrap()


async def partition_counts(
    settings: KafkaSettings, client_id: str, topics: Collection[str] | None = None
) -> dict[str, int]:
    """Number of partitions of each of ``topics`` that exists, or of every topic there is.

    Raises:
        BrokerUnreachable: no broker answers.
        BusError: the broker refuses.
    """
    client = await started(_MetadataClient(**client_options(settings, client_id)), settings)
    try:
        return await partitions_seen_by(client, settings, topics)
    finally:
        await discard(client)


async def partitions_seen_by(
    client: AIOKafkaClient, settings: KafkaSettings, topics: Collection[str] | None = None
) -> dict[str, int]:
    """Number of partitions of each of ``topics`` that exists, or of every topic, as a started client sees them now.

    Raises:
        BusUnavailable: no broker answers.
        BusError: the broker refuses.
    """
    doing = f"reading the topics of {address_of(settings)}"
    with our_errors(doing):
        async with asyncio.timeout(settings.connect_timeout_ms / 1000):
            if topics is not None:
                found = await topics_named(client, topics)
                return {name: len(partitions) for name, partitions in found.items()}
            try:
                cluster = await client.fetch_all_metadata()
            except errors.KafkaError as error:
                if type(error) is errors.KafkaError:  # what aiokafka raises when it asked every broker in vain
                    raise BusUnavailable(f"{doing}: no broker answers ({error})") from error
                raise
    return {topic: len(cluster.partitions_for_topic(topic)) for topic in cluster.topics()}


async def topics_named(client: AIOKafkaClient, names: Collection[str]) -> dict[str, list[dict[str, Any]]]:
    """The partitions of those of the topics that exist; asking makes none. Each has ``leader`` and ``replicas``.

    By name where names are known: a cluster that many share may have tens of thousands of partitions.

    Raises:
        KafkaError: no broker answers, or this client may not see one of them.
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
