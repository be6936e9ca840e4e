"""What we need of aiokafka beyond its documented interface: the only file that touches its private parts.

Written against aiokafka 0.14, to which ``requirements.in`` holds us (``~=0.14.0``). Each section says what it relies on
and why the documented interface does not do. ``tests/bus/kafka/test_aiokafka_internals.py`` compares every function
of the library that is relied on with the one that was read, so that a release that changes one fails there, not in a
run. What else of the library is imported in this folder has a public name and is used as documented.
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
    """The connections of a consumer or admin client, to ask what they have no method for.

    A producer shows its own as ``client``; these two do not.
    """
    return owner._client  # noqa: SLF001


def updates_metadata(owner: AIOKafkaConsumer) -> bool:
    """Whether the task of a started consumer still runs that finds out where partitions and coordinators are."""
    task = client_of(owner)._sync_task  # noqa: SLF001
    return task is not None and not task.done()


def connections_of(owner: object) -> AIOKafkaClient | None:
    """Those of any client of the library that is not started yet; none of what is none."""
    if isinstance(owner, AIOKafkaClient):
        return owner
    if isinstance(owner, AIOKafkaProducer):
        return owner.client
    return client_of(owner) if isinstance(owner, AIOKafkaConsumer | AIOKafkaAdminClient) else None


# Under TLS the library's ``close`` says farewell, and leaves the socket open until the broker has answered; where the
# event loop ends before, as that of a command that is refused does, for good.


async def visit(host: str, port: int, options: Mapping[str, Any]) -> None:
    """Connect to a broker, be let in, and leave nothing open, also where it lets nobody in; raises what says why."""
    connection = AIOKafkaConnection(host, port, **options)
    try:
        await connection.connect()
    finally:
        connection.close()
        # None where nobody listened. It forgets its transport once that is closed.
        if (protocol := connection._protocol) is not None and protocol._transport is not None:  # noqa: SLF001
            protocol._transport.abort()  # noqa: SLF001


# A node that is cut off takes connections, and answers nothing. The library waits for it as long as any request may
# take: first at the first address that was named, then for metadata at one node after the other, in any order and each
# time anew; and while it opens one connection it opens no other.


def begin_at(client: AIOKafkaClient, address: str) -> None:
    """Have a client that is not started yet ask this broker where the others are."""
    client._bootstrap_servers = address  # noqa: SLF001


def ask_others_soon(client: AIOKafkaClient, patience_s: float) -> None:
    """Have a client that is not started yet wait no longer for a connection, or for a node's metadata, than that.

    Nodes that were silent are asked last, until they answer again.
    """
    get_connection = client._get_conn  # noqa: SLF001
    silent: set[object] = set()

    async def connection(node_id: Any, **how: Any) -> Any:
        try:
            async with asyncio.timeout(patience_s):
                return await get_connection(node_id, **how)
        except TimeoutError:
            silent.add(node_id)
            client.force_metadata_update()  # as where a connection is refused
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


# What a client is told of topics it does as a line of its log; nothing else tells an expected line from others.


@contextmanager
def expecting_new_topics(names: Collection[str]) -> Iterator[None]:
    """Not a word, meanwhile, of these topics being unknown or without a leader: whoever made them waits for that.

    What else the library says, of them or of other topics, is logged as ever.
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
    """Have every consumer of this process read the bytes that it fetched with ``reader``, not ``MemoryRecords``.

    There is no hook for it, and the library's own reader is not fit for what strangers wrote: decompression without a
    bound, and an error in one record keeps the consumer at it for ever. The fetcher looks the name up in its module at
    each fetch, so replacing it there reaches consumers that already run. May be called again.
    """
    fetcher.MemoryRecords = reader


# Turns of the event loop between a poll that empties the fetcher's buffer and its next request on the wire: its task
# wakes up, starts one for the request, and that one finds a ready connection and writes. Three were measured; a turn
# costs microseconds and one too few a round trip to the broker, hence twice as many.
_TURNS_TO_REQUEST = 6


async def let_fetcher_request() -> None:
    """Give the fetcher the turns it needs to ask for more; without them it asks when the caller next waits."""
    for _ in range(_TURNS_TO_REQUEST):
        await asyncio.sleep(0)


def encoded(builder: BatchBuilder) -> bytes:
    """The bytes of a batch as they would be sent. Closes the batch; only a producer's sender asks for them publicly."""
    return bytes(builder._build())  # noqa: SLF001


# --- A producer whose tasks end, by force or by themselves -----------------------------------------------------------
#
# A producer works by three kinds of tasks: its sender, one task for each request that the sender has under way, and its
# client's update of metadata. The sender alone knows the requests, and awaits them when it ends; but when it fails, or
# is cancelled a second time, it leaves them to themselves. A request that outlives its sender waits out its back-off
# and then puts its batch back. The batch has failed meanwhile, so it is not where the request looks for it: the request
# ends in a ``KeyError`` that is never retrieved. Or it opens a connection of a closed client, and leaves it open.


def watch_tasks(producer: AIOKafkaProducer, broken: Callable[[BaseException | None], None]) -> None:
    """Have ``broken`` called when a task of a started producer ends that it cannot go on without.

    It is called with the task's error, or None if the task was cancelled, also when the producer is stopped. By then
    the requests under way are ended, and every caller that waits for a batch or for metadata has an error.
    """

    def ended(task: "asyncio.Task[Any]") -> None:
        error = None if task.cancelled() else task.exception()
        for request in _requests_of(producer):
            request.cancel()
        fail_waiting(producer, ProducerClosed() if error is None else KafkaError(f"a task of the client: {error!r}"))
        broken(error)

    if (manager := producer._txn_manager)._transaction_waiter is None:  # noqa: SLF001
        # The sender leaves its error there when it fails, also where no transaction was begun.
        manager._transaction_waiter = asyncio.get_running_loop().create_future()  # noqa: SLF001
    for task in (producer._sender.sender_task, producer.client._sync_task):  # noqa: SLF001
        task.add_done_callback(ended)


def fail_waiting(producer: AIOKafkaProducer, error: KafkaError) -> None:
    """Fail all that waits for a batch, or for metadata, of a producer whose tasks have ended; it takes no more."""
    accumulator, client = producer._message_accumulator, producer.client  # noqa: SLF001
    futures = inner_futures(producer)
    # A batch that was put back is looked for among those under way once it has failed, though it is not there.
    again = [batch for batches in accumulator._batches.values() for batch in batches if batch.retry_count]  # noqa: SLF001
    accumulator._pending_batches.update(again)  # noqa: SLF001
    accumulator.fail_all(error)
    for future in futures:
        if future.done() and not future.cancelled():
            future.exception()  # looked at, or asyncio would log that nobody did

    def refused() -> "asyncio.Future[bool]":
        asked: asyncio.Future[bool] = asyncio.get_running_loop().create_future()
        asked.set_exception(error)
        asked.exception()  # some ask and do not wait
        return asked

    # No task would end these waits any more. They end without an error; the next call gets one.
    client.force_metadata_update = refused
    if (update := client._md_update_fut) is not None and not update.done():  # noqa: SLF001
        update.set_result(False)


def _requests_of(producer: AIOKafkaProducer) -> "list[asyncio.Task[Any]]":
    """The tasks of the requests that a producer's sender has under way."""
    sender = producer._sender  # noqa: SLF001
    tasks = [task for task in asyncio.all_tasks() if task is not sender.sender_task]
    return [task for task in tasks if _owner_of(task) is sender]


def _owner_of(task: "asyncio.Task[Any]") -> object:
    """The object whose method the task runs; None for a function, or for a coroutine that is not of Python's own."""
    frame = getattr(task.get_coro(), "cr_frame", None)
    return None if frame is None else frame.f_locals.get("self")


async def end_sender(producer: AIOKafkaProducer) -> None:
    """End the tasks that send, and fail every batch they still had with ``ProducerClosed``.

    ``AIOKafkaProducer.stop`` waits until all batches are delivered or refused, which is for ever while no broker
    answers: an idempotent producer retries without an end.
    """
    sender = producer._sender.sender_task  # noqa: SLF001
    # Before the connections are closed, or a request would open them again.
    while tasks := [*_requests_of(producer), *([] if sender is None or sender.done() else [sender])]:
        for task in tasks:
            task.cancel()  # the sender ignores the first time, and awaits its requests
        await asyncio.wait(tasks, timeout=0.2)
    fail_waiting(producer, ProducerClosed())
    client = producer.client
    if (update := client._sync_task) is not None and update.done():  # noqa: SLF001
        client._sync_task = None  # noqa: SLF001  # its error would end ``close`` before the connections are closed
    await client.close()


def inner_futures(producer: AIOKafkaProducer) -> "set[asyncio.Future[Any]]":
    """Futures that a producer holds and does not hand out, and in which it may leave an error.

    Whoever ends it by force must look at their errors, or asyncio logs each as one that nobody saw.
    """
    accumulator, transactions = producer._message_accumulator, producer._txn_manager  # noqa: SLF001
    batches = [*itertools.chain(*accumulator._batches.values()), *accumulator._pending_batches]  # noqa: SLF001
    futures = {future for batch in batches for future in (batch.future, batch._drain_waiter)}  # noqa: SLF001
    if transactions is not None and transactions._transaction_waiter is not None:  # noqa: SLF001
        futures.add(transactions._transaction_waiter)  # noqa: SLF001
    return futures


# --- Who the holder of a transactional id is (KIP-360) ---------------------------------------------------------------
#
# A producer that opens a transactional id for the first time fences every other holder of it. One that opens it again
# must say which holder it was, so that the broker refuses it where there is a newer one meanwhile. That is version 3 of
# InitProducerId; aiokafka knows version 0 only, in which reopening would fence the newer holder.

_INVALID_PRODUCER_EPOCH, _PRODUCER_FENCED = 47, 90


class ProducerIdentity(NamedTuple):
    """What the broker tells holders of a transactional id apart by. The epoch grows with each new holder."""

    producer_id: int
    epoch: int


NO_IDENTITY = ProducerIdentity(-1, -1)
"""Kafka's own value for a producer that was none before."""


def open_with_identity(producer: AIOKafkaProducer, identity: ProducerIdentity) -> None:
    """Have a producer that is not started yet open its transactional id as the holder that it was.

    ``start`` then raises ``ProducerFenced`` if there is a newer one.
    """
    sender = producer._sender  # noqa: SLF001

    async def init_producer_id(node_id: int) -> bool:
        handler = _InitProducerIdHandler(sender)
        handler.identity = identity
        return bool(await handler.do(node_id))

    sender._do_init_pid = init_producer_id  # noqa: SLF001


def identity_of(producer: AIOKafkaProducer) -> ProducerIdentity:
    """Which holder a started transactional producer is."""
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
    """aiokafka's own handler, retries included, with our request and the two refusals that version 0 did not have."""

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
# From version 3 on, the answer to ApiVersions lists the features that a broker supports, by which its release is known.
# aiokafka asks in version 0 only.

_SUPPORTED_FEATURES = 0
"""Tag of the list in the answer."""
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
        """The answer to this request alone has the old header in every version, so that any client can read it."""
        return ResponseHeader_v0.decode(read_buffer)


class _ApiVersionsRequest(Request[_ApiVersionsStruct]):  # type: ignore[misc]
    API_KEY = 18

    def build(self, request_struct_class: type[_ApiVersionsStruct]) -> _ApiVersionsStruct:
        return request_struct_class("streamrl", "1", {})


async def supported_features(client: AIOKafkaClient, node_id: int) -> dict[str, int]:
    """The highest level of each feature that a broker supports, by name; empty: it does not tell."""
    answer = await client.send(node_id, _ApiVersionsRequest())
    encoded_features = answer.tags.get(_SUPPORTED_FEATURES)
    if not encoded_features:
        return {}
    return {name: highest for name, _, highest, _ in _FEATURES.decode(BytesIO(encoded_features))}
