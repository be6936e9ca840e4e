"""Uses of aiokafka beyond its documented interface: the only file that touches its private parts.

It is written for aiokafka 0.14, which ``pyproject.toml`` pins (``~=0.14.0``). Each section says which internals it
uses and why the documented interface is not enough. ``tests/bus/kafka/test_aiokafka_internals.py`` compares the source
of every used function with the source that this file was written for. So a release that changes one fails there and not
in a run. All other imports from the library in this folder have public names and are used as documented.
"""

import asyncio
import itertools
import logging
import random
from collections.abc import Callable, Collection, Iterator, Mapping
from contextlib import contextmanager
from io import BytesIO
from typing import Any, NamedTuple

from aiokafka import AIOKafkaConsumer, AIOKafkaProducer
from aiokafka.admin import AIOKafkaAdminClient
from aiokafka.client import AIOKafkaClient, ConnectionGroup
from aiokafka.cluster import ClusterMetadata
from aiokafka.conn import AIOKafkaConnection
from aiokafka.consumer import fetcher
from aiokafka.errors import KafkaError, ProducerClosed, ProducerFenced
from aiokafka.producer.message_accumulator import BatchBuilder
from aiokafka.producer.sender import InitPIDHandler
from aiokafka.protocol.api import Request, RequestStruct, Response, ResponseHeader_v0
from aiokafka.protocol.metadata import MetadataRequest
from aiokafka.protocol.types import CompactArray, CompactString, Int16, Int32, Int64, Schema, TaggedFields

# --- Connections -----------------------------------------------------------------------------------------------------


def client_of(owner: AIOKafkaConsumer | AIOKafkaAdminClient) -> AIOKafkaClient:
    """The connections of a consumer or admin client, for requests that these have no method for.

    A producer exposes its connections as ``client``; these two do not.
    """
    return owner._client  # noqa: SLF001


def updates_metadata(owner: AIOKafkaConsumer) -> bool:
    """Whether a started consumer's metadata task, which finds partitions and coordinators, still runs."""
    task = client_of(owner)._sync_task  # noqa: SLF001
    return task is not None and not task.done()


def connections_of(owner: object) -> AIOKafkaClient | None:
    """The connections of any client of the library that is not started yet; None for other objects."""
    if isinstance(owner, AIOKafkaClient):
        return owner
    if isinstance(owner, AIOKafkaProducer):
        return owner.client
    return client_of(owner) if isinstance(owner, AIOKafkaConsumer | AIOKafkaAdminClient) else None


# Under TLS, the library's ``close`` sends a closing message and leaves the socket open until the broker has answered.
# If the event loop ends before, as after a refused command, the socket stays open for good.


async def check_login(host: str, port: int, options: Mapping[str, Any]) -> None:
    """Connect to a broker, log in and disconnect. Leaves nothing open, also after a refusal, and raises its error."""
    connection = AIOKafkaConnection(host, port, **options)
    try:
        await connection.connect()
    finally:
        connection.close()
        # None if nothing listened. The protocol drops its transport once that is closed.
        if (protocol := connection._protocol) is not None and protocol._transport is not None:  # noqa: SLF001
            protocol._transport.abort()  # noqa: SLF001


# A node that is cut off accepts connections and answers nothing. The library waits for it as long as any request may
# take: first at the first bootstrap address, then for metadata at one node after the other, in random order and each
# time again. While it opens one connection, it opens no other.


def begin_at(client: AIOKafkaClient, address: str) -> None:
    """Make a client that is not started yet ask the broker at ``address`` for the other brokers."""
    client._bootstrap_servers = address  # noqa: SLF001


def limit_broker_waits(client: AIOKafkaClient, patience_s: float) -> None:
    """Limit the time that a client, not started yet, waits for a connection or for a node's metadata to ``patience_s``.

    The client asks silent nodes last, until they answer again.
    """
    get_connection = client._get_conn  # noqa: SLF001
    silent: set[object] = set()

    async def connection(node_id: Any, **how: Any) -> Any:
        try:
            async with asyncio.timeout(patience_s):
                return await get_connection(node_id, **how)
        except TimeoutError:
            silent.add(node_id)
            client.force_metadata_update()  # as after a refused connection
            return None

    async def metadata_of(node_id: Any, request: MetadataRequest) -> Any:
        found = await connection(node_id)
        try:
            async with asyncio.timeout(patience_s):
                return None if found is None else await found.send(request)
        except (KafkaError, TimeoutError):
            return None

    async def update(cluster: ClusterMetadata, topics: Collection[str] | None) -> bool:
        connections, bootstrap = client._conns, ("bootstrap", ConnectionGroup.DEFAULT)  # noqa: SLF001
        nodes = [broker.nodeId for broker in client.cluster.brokers()]
        nodes += ["bootstrap"] if bootstrap in connections else []
        random.shuffle(nodes)
        for node_id in sorted(nodes, key=silent.__contains__):
            answer = await metadata_of(node_id, MetadataRequest(list(topics) if topics else None))
            if answer is None:
                silent.add(node_id)
                continue
            silent.discard(node_id)
            if not answer.brokers:
                return False
            cluster.update_metadata(answer)
            if bootstrap in connections and client.cluster.brokers():
                connections.pop(bootstrap).close()
            return True
        cluster.failed_update(None)
        return False

    def random_node() -> int | None:
        nodes = [broker.nodeId for broker in client.cluster.brokers()]
        answering = [node_id for node_id in nodes if node_id not in silent] or nodes
        return random.choice(answering) if answering else None

    client._get_conn = connection  # noqa: SLF001
    client._metadata_update = update  # noqa: SLF001
    client.get_random_node = random_node


# The library logs missing topics with the texts below. Only by these texts can expected log lines be recognised.


@contextmanager
def expecting_new_topics(names: Collection[str]) -> Iterator[None]:
    """Within the block, drop the library's log lines that say that these topics are unknown or have no leader.

    The caller has just made the topics and waits for their leaders. All other lines of the library are logged as usual.
    """

    def is_news(record: logging.LogRecord) -> bool:
        is_missing = str(record.msg).startswith(("Topic %s not found", "Topic %s is not available"))
        return not (is_missing and isinstance(record.args, tuple) and record.args[0] in names)

    logger = logging.getLogger(ClusterMetadata.__module__)
    logger.addFilter(is_news)
    try:
        yield
    finally:
        logger.removeFilter(is_news)


# --- Reading ---------------------------------------------------------------------------------------------------------


def replace_record_reader(reader: type) -> None:
    """Make every consumer of this process read fetched bytes with ``reader``, not ``MemoryRecords``; idempotent.

    The library has no hook for this. Its own reader is not safe for bytes from untrusted writers: its decompression has
    no bound, and an error in one record stops the consumer there for ever. The fetcher looks the name up in its module
    at each fetch, so a replacement there also affects consumers that already run.
    """
    fetcher.MemoryRecords = reader


# Turns of the event loop between a poll that empties the fetcher's buffer and the next request on the wire: the
# fetcher's task wakes up and starts a task for the request, which finds a ready connection and writes. Three turns were
# measured. This is twice as many, because a turn costs microseconds, and one too few costs a round trip to the broker.
_TURNS_TO_REQUEST = 6


async def let_fetcher_request() -> None:
    """Give the fetcher enough turns to request more records. Otherwise it would do so when the caller waits next."""
    for _ in range(_TURNS_TO_REQUEST):
        await asyncio.sleep(0)


def encoded(builder: BatchBuilder) -> bytes:
    """The bytes of a batch as they would be sent. It closes the batch. Publicly, only a producer's sender gets them."""
    return bytes(builder._build())  # noqa: SLF001


# --- A producer whose tasks end, by force or after an error ----------------------------------------------------------
#
# A producer has three kinds of tasks: its sender, one task for each request in flight, and its client's update of
# metadata. Only the sender knows the requests, and it awaits them when it ends. But if it fails, or is cancelled a
# second time, it abandons them. A request that outlives its sender waits for its back-off and then puts its batch back.
# The batch has failed by then, so the request does not find it and ends in a ``KeyError`` that is never retrieved. Or
# the request opens a connection of a closed client and leaves it open.


def watch_tasks(producer: AIOKafkaProducer, broken: Callable[[BaseException | None], None]) -> None:
    """Call ``broken`` when a task ends that a started producer needs.

    Its argument is the task's error, or None if the task was cancelled. It is also called when the producer is stopped.
    By then the requests in flight have been cancelled, and every caller that waits for a batch or for metadata has an
    error.
    """

    def ended(task: "asyncio.Task[Any]") -> None:
        error = None if task.cancelled() else task.exception()
        for request in _requests_of(producer):
            request.cancel()
        fail_waiting(producer, ProducerClosed() if error is None else KafkaError(f"a task of the client: {error!r}"))
        broken(error)

    if (manager := producer._txn_manager)._transaction_waiter is None:  # noqa: SLF001
        # A failing sender leaves its error there, even if no transaction was started.
        manager._transaction_waiter = asyncio.get_running_loop().create_future()  # noqa: SLF001
    for task in (producer._sender.sender_task, producer.client._sync_task):  # noqa: SLF001
        task.add_done_callback(ended)


def fail_waiting(producer: AIOKafkaProducer, error: KafkaError) -> None:
    """Fail all waits for a batch or for metadata of a producer whose tasks have ended. It accepts no more batches."""
    accumulator, client = producer._message_accumulator, producer.client  # noqa: SLF001
    futures = inner_futures(producer)
    # When a batch that was put back fails, the library searches it among the pending batches, where it is not.
    again = [batch for batches in accumulator._batches.values() for batch in batches if batch.retry_count]  # noqa: SLF001
    accumulator._pending_batches.update(again)  # noqa: SLF001
    accumulator.fail_all(error)
    for future in futures:
        if future.done() and not future.cancelled():
            future.exception()  # retrieved, because asyncio would log it otherwise

    def refused() -> "asyncio.Future[bool]":
        asked: asyncio.Future[bool] = asyncio.get_running_loop().create_future()
        asked.set_exception(error)
        asked.exception()  # retrieved, because some callers do not wait for it
        return asked

    # No task would end these waits any more. They end without an error; the next call gets one.
    client.force_metadata_update = refused
    if (update := client._md_update_fut) is not None and not update.done():  # noqa: SLF001
        update.set_result(False)


def _requests_of(producer: AIOKafkaProducer) -> "list[asyncio.Task[Any]]":
    """The tasks of the requests that a producer's sender has in flight."""
    sender = producer._sender  # noqa: SLF001
    tasks = [task for task in asyncio.all_tasks() if task is not sender.sender_task]
    return [task for task in tasks if _owner_of(task) is sender]


def _owner_of(task: "asyncio.Task[Any]") -> object:
    """The object whose method a task runs; None for a function, and for a coroutine that is not written in Python."""
    frame = getattr(task.get_coro(), "cr_frame", None)
    return None if frame is None else frame.f_locals.get("self")


async def end_sender(producer: AIOKafkaProducer) -> None:
    """End the tasks that send, and fail their remaining batches with ``ProducerClosed``.

    ``AIOKafkaProducer.stop`` waits until all batches are delivered or refused. While no broker answers, it never
    returns, because an idempotent producer retries for ever.
    """
    sender = producer._sender.sender_task  # noqa: SLF001
    # Before the connections are closed, because a request would open them again.
    while tasks := [*_requests_of(producer), *([] if sender is None or sender.done() else [sender])]:
        for task in tasks:
            task.cancel()  # the sender ignores its first cancellation, and awaits its requests
        await asyncio.wait(tasks, timeout=0.2)
    fail_waiting(producer, ProducerClosed())
    client = producer.client
    if (update := client._sync_task) is not None and update.done():  # noqa: SLF001
        client._sync_task = None  # noqa: SLF001  # its error would end ``close`` before the connections are closed
    await client.close()


def inner_futures(producer: AIOKafkaProducer) -> "set[asyncio.Future[Any]]":
    """Futures that a producer holds and does not return to callers, and in which it may leave an error.

    Code that ends the producer by force must retrieve their errors, because asyncio would log each of them otherwise.
    """
    accumulator, transactions = producer._message_accumulator, producer._txn_manager  # noqa: SLF001
    batches = [*itertools.chain(*accumulator._batches.values()), *accumulator._pending_batches]  # noqa: SLF001
    futures = {future for batch in batches for future in (batch.future, batch._drain_waiter)}  # noqa: SLF001
    if transactions is not None and transactions._transaction_waiter is not None:  # noqa: SLF001
        futures.add(transactions._transaction_waiter)  # noqa: SLF001
    return futures


# --- Identity of a transactional id's holder (KIP-360) ---------------------------------------------------------------
#
# A producer that opens a transactional id for the first time fences every other holder. A producer that reopens it must
# name the holder that it was, so that the broker refuses it if there is a newer one. This needs version 3 of
# InitProducerId. aiokafka only knows version 0, in which reopening would fence the newer holder.

_INVALID_PRODUCER_EPOCH, _PRODUCER_FENCED = 47, 90


class ProducerIdentity(NamedTuple):
    """Identifies one holder of a transactional id to the broker. The epoch grows with each new holder."""

    producer_id: int
    epoch: int


NO_IDENTITY = ProducerIdentity(-1, -1)
"""Kafka's value for a producer that was no holder before."""


def open_with_identity(producer: AIOKafkaProducer, identity: ProducerIdentity) -> None:
    """Make a producer that is not started yet open its transactional id as the holder with this identity.

    ``start`` then raises ``ProducerFenced`` if there is a newer holder.
    """
    sender = producer._sender  # noqa: SLF001

    async def init_producer_id(node_id: int) -> bool:
        handler = _InitProducerIdHandler(sender)
        handler.identity = identity
        return bool(await handler.do(node_id))

    sender._do_init_pid = init_producer_id  # noqa: SLF001


def identity_of(producer: AIOKafkaProducer) -> ProducerIdentity:
    """The identity of a started transactional producer."""
    manager = producer._txn_manager  # noqa: SLF001
    return ProducerIdentity(manager.producer_id, manager.producer_epoch)


class _InitProducerIdResponse(Response):  # type: ignore[misc]
    API_KEY = 22
    API_VERSION = 3
    SCHEMA = Schema(
        ("throttle_time_ms", Int32),
        ("error_code", Int16),
        ("producer_id", Int64),
        ("producer_epoch", Int16),
        ("tags", TaggedFields),
    )


class _InitProducerIdStruct(RequestStruct):  # type: ignore[misc]
    API_KEY = 22
    API_VERSION = 3
    FLEXIBLE_VERSION = True
    RESPONSE_TYPE = _InitProducerIdResponse
    SCHEMA = Schema(
        ("transactional_id", CompactString("utf-8")),
        ("transaction_timeout_ms", Int32),
        ("producer_id", Int64),
        ("producer_epoch", Int16),
        ("tags", TaggedFields),
    )


class _InitProducerIdRequest(Request[_InitProducerIdStruct]):  # type: ignore[misc]
    API_KEY = 22

    def __init__(self, transactional_id: str, timeout_ms: int, identity: ProducerIdentity) -> None:
        self._fields: tuple[object, ...] = (transactional_id, timeout_ms, *identity, {})

    def build(self, request_struct_class: type[_InitProducerIdStruct]) -> _InitProducerIdStruct:
        return request_struct_class(*self._fields)


class _InitProducerIdHandler(InitPIDHandler):  # type: ignore[misc]
    """aiokafka's handler and its retries, with the request of version 3 and the two refusals that are new in it."""

    identity = NO_IDENTITY

    def create_request(self) -> _InitProducerIdRequest:
        manager = self._sender._txn_manager  # noqa: SLF001
        return _InitProducerIdRequest(manager.transactional_id, manager.transaction_timeout_ms, self.identity)

    def handle_response(self, response: _InitProducerIdResponse) -> float | None:
        if response.error_code in (_INVALID_PRODUCER_EPOCH, _PRODUCER_FENCED):
            raise ProducerFenced
        backoff: float | None = super().handle_response(response)
        return backoff


# --- Features of a broker (KIP-584) ----------------------------------------------------------------------------------
#
# From version 3 on, the answer to ApiVersions lists the features that a broker supports, which show its release.
# aiokafka only sends version 0.

_SUPPORTED_FEATURES = 0
"""Tag of the features' list in the answer."""
_FEATURES = CompactArray(
    ("name", CompactString("utf-8")), ("lowest", Int16), ("highest", Int16), ("tags", TaggedFields)
)


class _ApiVersionsResponse(Response):  # type: ignore[misc]
    API_KEY = 18
    API_VERSION = 3
    SCHEMA = Schema(
        ("error_code", Int16),
        ("api_versions", CompactArray(("key", Int16), ("lowest", Int16), ("highest", Int16), ("tags", TaggedFields))),
        ("throttle_time_ms", Int32),
        ("tags", TaggedFields),
    )


class _ApiVersionsStruct(RequestStruct):  # type: ignore[misc]
    API_KEY = 18
    API_VERSION = 3
    FLEXIBLE_VERSION = True
    RESPONSE_TYPE = _ApiVersionsResponse
    SCHEMA = Schema(("name", CompactString("utf-8")), ("version", CompactString("utf-8")), ("tags", TaggedFields))

    def parse_response_header(self, read_buffer: BytesIO | bytes) -> Any:
        """Only the answer to this request has the old header in every version, so that any client can read it."""
        return ResponseHeader_v0.decode(read_buffer)


class _ApiVersionsRequest(Request[_ApiVersionsStruct]):  # type: ignore[misc]
    API_KEY = 18

    def build(self, request_struct_class: type[_ApiVersionsStruct]) -> _ApiVersionsStruct:
        return request_struct_class("streamrl", "1", {})


async def supported_features(client: AIOKafkaClient, node_id: int) -> dict[str, int]:
    """The highest level of each feature that a broker supports, by name; empty if the broker does not list them."""
    answer = await client.send(node_id, _ApiVersionsRequest())
    encoded_features = answer.tags.get(_SUPPORTED_FEATURES)
    if not encoded_features:
        return {}
    return {name: highest for name, _, highest, _ in _FEATURES.decode(BytesIO(encoded_features))}
