"""Fails when aiokafka changes what ``streamrl/bus/kafka/aiokafka_internals.py`` relies on.

What fails here: read the function in the new release, beside the section of that file; mend the section where needed;
only then put the digest that the test prints.
"""

import asyncio
import gc
import inspect
import logging
import struct
from collections.abc import AsyncIterator
from hashlib import sha256
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from aiokafka import AIOKafkaConsumer, AIOKafkaProducer
from aiokafka import TopicPartition as KafkaPartition
from aiokafka.admin import AIOKafkaAdminClient
from aiokafka.client import AIOKafkaClient
from aiokafka.cluster import ClusterMetadata
from aiokafka.conn import AIOKafkaConnection
from aiokafka.consumer import fetcher
from aiokafka.errors import (
    KafkaConnectionError,
    KafkaError,
    LeaderNotAvailableError,
    ProducerClosed,
    ProducerFenced,
    UnknownTopicOrPartitionError,
)
from aiokafka.producer.message_accumulator import BatchBuilder, MessageAccumulator, MessageBatch
from aiokafka.producer.sender import BaseHandler, InitPIDHandler, Sender, SendProduceReqHandler
from aiokafka.producer.transaction_manager import TransactionManager
from aiokafka.protocol.api import Request, RequestStruct
from aiokafka.protocol.fetch import FetchRequest

import streamrl.bus.kafka
from streamrl.bus.kafka.aiokafka_internals import (
    ProducerIdentity,
    client_of,
    encoded,
    end_sender,
    expecting_new_topics,
    identity_of,
    inner_futures,
    let_fetcher_request,
    limit_broker_waits,
    open_with_identity,
    replace_record_reader,
    supported_features,
    watch_tasks,
)
from streamrl.bus.kafka.bus import KafkaBus
from streamrl.bus.kafka.limits import ClientLimits
from streamrl.bus.kafka.publisher import append, new_builder
from streamrl.bus.kafka.records import SafeRecords
from streamrl.bus.kafka.settings import KafkaSettings
from streamrl.bus.port import Outgoing
from tests.broker_fixture import unique_numbers
from tests.contract.topics import create_topic
from tests.progress import patience

_numbers = unique_numbers()

READ = [
    # What the fetcher asks of a batch and of its records, and that it looks ``MemoryRecords`` up when it fetches.
    (fetcher.PartitionRecords._unpack_records, "b803e6d46480"),
    (fetcher.PartitionRecords._contains_abort_marker, "17e9ad2322ef"),
    (fetcher.PartitionRecords._consumer_record, "e668541600b0"),
    (fetcher.Fetcher._proc_fetch_request, "59bf948fff47"),
    # How many turns of the loop it needs until the next request.
    (fetcher.Fetcher._fetch_requests_routine, "2a8ec5932644"),
    (fetcher.Fetcher.fetched_records, "be4348896b9b"),
    # What ending a sender takes, and in which futures errors are left.
    (Sender._sender_routine, "2380dc5e333d"),
    (Sender._fail_all, "5a67e3b6f87b"),
    (Sender._maybe_do_transactional_request, "71227a8a4d9c"),
    (SendProduceReqHandler.do, "2dccd3d56b16"),
    (MessageAccumulator.reenqueue, "f75f518a1ae2"),
    (AIOKafkaClient.close, "02119d4d618a"),
    (AIOKafkaClient._md_synchronizer, "e0421bffa9a7"),
    (AIOKafkaClient.force_metadata_update, "cb7befef21c8"),
    (MessageAccumulator.fail_all, "f1e12e8100bf"),
    (MessageAccumulator._pop_batch, "41cc98a298ef"),
    (MessageAccumulator.add_batch, "5ed1c5b1367a"),
    (MessageBatch.failure, "719b2122c318"),
    (AIOKafkaProducer.stop, "43ef97147111"),
    (TransactionManager.begin_transaction, "1b02c269d88d"),
    (TransactionManager.error_transaction, "5c72d40ab25e"),
    (TransactionManager.fatal_error, "8e9fd08dc500"),
    # How a producer gets its identity, and that the sender calls what was put on the instance.
    (Sender._maybe_wait_for_pid, "577189636b56"),
    (Sender._do_init_pid, "38139a8cce4f"),
    (BaseHandler.do, "1106439a38fe"),
    (InitPIDHandler, "4f466dcfc4b1"),
    (TransactionManager.set_pid_and_epoch, "1e174622d40d"),
    # How requests of our own are sent and their answers read.
    (Request.prepare, "3a65d9fdefe3"),
    (RequestStruct, "0c94b7d19018"),
    (AIOKafkaClient.send, "246b277687d7"),
    # How a batch becomes bytes, and what is raised when every broker was asked in vain.
    (BatchBuilder.append, "657d76f55157"),
    (BatchBuilder._build, "2ea37ea86320"),
    (AIOKafkaClient.fetch_all_metadata, "8eeea5926b0d"),
    # Whom a client asks first, and for how long; that a connection that is given up while it opens is closed.
    (AIOKafkaClient.bootstrap, "198943b004e5"),
    (AIOKafkaClient._metadata_update, "06dc51ed3e0d"),
    (AIOKafkaClient._get_conn, "68ce5d839171"),
    (AIOKafkaClient.get_random_node, "0e2daf38b78e"),
    (AIOKafkaConnection.connect, "b0f9ba7f0cf6"),
    # That closing it forgets the transport, which only its protocol knows then.
    (AIOKafkaConnection.close, "28f164aa1e4f"),
    # What is logged of a topic that is not there yet.
    (ClusterMetadata.update_metadata, "6c2cce8f96dc"),
]


@pytest.mark.parametrize(("function", "digest"), READ, ids=lambda each: getattr(each, "__qualname__", None))
def test_the_library_is_the_one_that_was_read(function: Any, digest: str) -> None:
    found = sha256(inspect.getsource(function).encode()).hexdigest()[:12]
    assert found == digest, f"{function.__qualname__} of aiokafka changed: read it anew, see the top of this file"


def test_no_other_file_of_the_product_touches_private_parts_of_the_library() -> None:
    touching = [
        path.name
        for path in (Path(streamrl.bus.kafka.__file__).parents[1]).rglob("*.py")
        if "SLF001" in (text := path.read_text()) and "aiokafka" in text
    ]
    assert touching == ["aiokafka_internals.py"]


def test_records_are_read_by_what_was_installed() -> None:
    replace_record_reader(SafeRecords)
    assert fetcher.MemoryRecords is SafeRecords
    assert "MemoryRecords" in fetcher.Fetcher._proc_fetch_request.__code__.co_names


def test_only_what_is_expected_of_new_topics_is_not_logged(
    caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    # As a role that ran in this process may have left it.
    logger = logging.getLogger(ClusterMetadata.__module__)
    monkeypatch.setattr(logger, "propagate", False)
    monkeypatch.setattr(logger, "disabled", False)
    monkeypatch.setattr(logger, "handlers", [caplog.handler])
    caplog.set_level(logging.INFO, logger.name)
    cluster = ClusterMetadata()

    def told(*topics: tuple[int, str]) -> None:
        found: list[tuple[Any, ...]] = [(error, name, False, []) for error, name in topics]
        answer = SimpleNamespace(API_VERSION=5, controller_id=1, brokers=[(1, "h", 9, "")], topics=found)
        cluster.update_metadata(answer)

    missing, leaderless, unauthorized = UnknownTopicOrPartitionError.errno, LeaderNotAvailableError.errno, 29
    with expecting_new_topics({"r.steps", "r.control"}):
        told((missing, "r.steps"), (leaderless, "r.control"))
        assert not caplog.records
        told((missing, "other.steps"), (unauthorized, "r.steps"))
    told((missing, "r.steps"))
    assert [record.getMessage() for record in caplog.records] == [
        "Topic other.steps not found in cluster metadata",
        "Topic r.steps is not authorized for this client",
        "Topic r.steps not found in cluster metadata",
    ]


def test_a_batch_encodes_to_the_bytes_that_the_sender_would_send() -> None:
    builder = new_builder(1 << 20, "none")
    append(builder, Outgoing("t", b"value", "key"))
    assert b"value" in encoded(builder)
    assert builder.closed()


async def test_consumers_and_admin_clients_show_their_connections() -> None:
    for owner in (AIOKafkaConsumer(), AIOKafkaAdminClient()):
        assert isinstance(client_of(owner), AIOKafkaClient)
        owner._closed = True  # or it would complain that nobody stopped it


@pytest.mark.parametrize("hangs", ["the connection", "the answer"])
async def test_a_node_that_is_silent_is_given_up_soon_and_asked_last_until_it_answers(hangs: str) -> None:
    client, asked, silent = AIOKafkaClient(), [], {1, 2}

    async def send(node_id: int) -> object:
        if node_id in silent:
            await asyncio.sleep(60)
        return SimpleNamespace(brokers=[node_id])

    async def connection(node_id: int) -> object:
        asked.append(node_id)
        if node_id in silent and hangs == "the connection":
            await asyncio.sleep(60)
        return SimpleNamespace(send=lambda _request: send(node_id))

    client._get_conn = connection
    client.force_metadata_update = lambda: None
    updated: list[object] = []
    client.cluster = SimpleNamespace(
        brokers=lambda: [SimpleNamespace(nodeId=node_id) for node_id in (1, 2, 3)],
        update_metadata=updated.append,
        failed_update=lambda _: None,
    )
    limit_broker_waits(client, 0.02)
    async with patience(5):
        for _ in range(30):
            assert await client._metadata_update(client.cluster, None)
    assert len(updated) == 30
    assert max(asked.count(node_id) for node_id in (1, 2)) <= 1
    assert {client.get_random_node() for _ in range(30)} <= {1, 2, 3} - {node_id for node_id in asked if node_id != 3}
    # Nobody else answers, so all are asked; who does is one of the others again.
    silent ^= {1, 2, 3}
    assert await client._metadata_update(client.cluster, None)
    silent.clear()
    assert client.get_random_node() in (1, 2)


@pytest.fixture
async def producer() -> AsyncIterator[AIOKafkaProducer]:
    """Transactional, never started: no broker is asked."""
    made = AIOKafkaProducer(transactional_id="id")
    yield made
    made._closed = True  # or it would complain that nobody stopped it


async def test_ending_a_sender_fails_what_it_had_and_no_error_stays_unseen(producer: AIOKafkaProducer) -> None:
    manager = producer._txn_manager
    manager.set_pid_and_epoch(1, 0)
    manager.begin_transaction()
    batch = producer._message_accumulator._append_batch(new_builder(1000, "none"), KafkaPartition("t", 0))
    producer._sender._sender_task = task = asyncio.create_task(asyncio.sleep(60))
    assert inner_futures(producer) == {batch.future, batch._drain_waiter, manager.wait_for_transaction_end()}
    await end_sender(producer)
    assert task.cancelled()
    errors = [future.exception() for future in inner_futures(producer) if future.done()]
    assert [type(error) for error in errors] == [ProducerClosed, ProducerClosed]
    assert batch.future.done()


@pytest.fixture
async def unseen() -> AsyncIterator[list[dict[str, Any]]]:
    """What the event loop would log at the end: errors of tasks, futures and callbacks that nobody retrieved."""
    found: list[dict[str, Any]] = []
    asyncio.get_running_loop().set_exception_handler(lambda _loop, context: found.append(context))
    yield found
    await asyncio.sleep(0.2)  # twice the back-off of a request
    gc.collect()
    asyncio.get_running_loop().set_exception_handler(None)
    assert not found


class SendingProducer:
    """A producer without a broker, to two partitions of two nodes; every request fails, and is to be sent again."""

    def __init__(self) -> None:
        self.producer = AIOKafkaProducer(enable_idempotence=True)
        self.client, self.sender = self.producer.client, self.producer._sender
        self.requests = 0
        self.client.send = self._send
        self.lead_by(0, 1)
        self.client._md_update_fut = None
        self.client._sync_task = asyncio.create_task(asyncio.sleep(60))
        self.producer._txn_manager.set_pid_and_epoch(1, 0)
        self.sender._sender_task = asyncio.create_task(self.sender._sender_routine())
        self.sender._sender_task.add_done_callback(self.sender._fail_all)

    def lead_by(self, *leaders: int) -> None:
        partitions: list[tuple[Any, ...]] = [(0, number, leader, [], [], []) for number, leader in enumerate(leaders)]
        brokers = [(node, "127.0.0.1", 1, "") for node in (0, 1)]
        self.client.cluster.update_metadata(
            SimpleNamespace(API_VERSION=5, controller_id=0, brokers=brokers, topics=[(0, "t", False, partitions)])
        )

    async def _send(self, _node_id: int, _request: object) -> object:
        self.requests += 1
        raise KafkaConnectionError("the broker is gone")

    async def send(self) -> "list[asyncio.Future[Any]]":
        """Two batches, whose requests have failed and wait for another try."""
        sent = [await self.producer.send_batch(filled_builder(), "t", partition=number) for number in (0, 1)]
        while self.requests < 2:
            await asyncio.sleep(0)
        return sent

    def wake_sender(self) -> None:
        self.producer._message_accumulator.waiter().set_result(None)

    async def fail_sender(self) -> None:
        async def fail() -> None:
            raise ZeroDivisionError("a mistake in the sender")

        self.sender._maybe_wait_for_pid = fail
        self.wake_sender()
        await asyncio.wait({self.sender.sender_task})


def filled_builder() -> BatchBuilder:
    builder = new_builder(1000, "none")
    append(builder, Outgoing("t", b"value", None, 0))
    return builder


@pytest.fixture
async def sending(unseen: list[dict[str, Any]]) -> AsyncIterator[SendingProducer]:
    made = SendingProducer()
    yield made
    await end_sender(made.producer)
    made.producer._closed = True  # or it would complain that nobody stopped it


async def test_a_request_does_not_outlive_its_sender_that_is_ended(sending: SendingProducer) -> None:
    sent = await sending.send()
    await end_sender(sending.producer)
    for future in sent:
        with pytest.raises(ProducerClosed):
            await future
    await asyncio.sleep(0.2)  # twice the back-off
    assert sending.requests == 2


async def test_a_request_does_not_outlive_its_sender_that_fails(sending: SendingProducer) -> None:
    broken: list[BaseException | None] = []
    watch_tasks(sending.producer, broken.append)
    sent = await sending.send()
    await sending.fail_sender()
    await asyncio.sleep(0)
    assert [str(error) for error in broken] == ["KafkaError: Unexpected error during batch delivery"]
    for future in sent:
        with pytest.raises(KafkaError, match="Unexpected error"):
            await future
    with pytest.raises(KafkaError):
        await sending.producer.send_batch(filled_builder(), "t", partition=0)


async def test_a_batch_that_waits_for_a_leader_fails_without_an_error_of_its_own(sending: SendingProducer) -> None:
    sent = await sending.send()
    sending.lead_by(-1, -1)
    async with patience(10):
        while len(sending.producer._message_accumulator._batches) < 2:
            await asyncio.sleep(0.01)
    await end_sender(sending.producer)
    for future in sent:
        with pytest.raises(ProducerClosed):
            await future


@pytest.mark.parametrize("ending", ["failed", "cancelled"])
async def test_senders_stop_waiting_when_metadata_updates_have_ended(sending: SendingProducer, ending: str) -> None:
    async def fail() -> None:
        if ending == "failed":
            raise ZeroDivisionError("a mistake in the update")
        await asyncio.sleep(60)

    broken: list[BaseException | None] = []
    sending.client._sync_task.cancel()
    sending.client._sync_task = updating = asyncio.create_task(fail())
    watch_tasks(sending.producer, broken.append)
    sent: list[asyncio.Future[Any]] = [asyncio.create_task(sending.client._wait_on_metadata("unknown"))]
    if ending == "cancelled":
        sent += await sending.send()
        updating.cancel()
    for future in sent:
        with pytest.raises(KafkaError):
            await future
    assert [type(error) for error in broken[:1]] == [ZeroDivisionError if ending == "failed" else type(None)]


class TestOpeningATransactionalId:
    """``Sender._maybe_wait_for_pid`` is what ``start`` waits for."""

    async def open(self, producer: AIOKafkaProducer, identity: ProducerIdentity, *answers: tuple[Any, ...]) -> Any:
        """Open it at a broker that gives these answers; what the last request said."""
        sent, coming = [], iter(answers)

        async def send(_node_id: int, request: Request[Any], **_group: object) -> object:
            struct = request.prepare({22: (0, 4)})
            sent.append(struct)
            throttled, code, producer_id, epoch = next(coming)
            return struct.RESPONSE_TYPE(throttled, code, producer_id, epoch, {})

        async def node(*_asked: object) -> int:
            return 0

        producer.client.send, producer.client.force_metadata_update = send, node
        producer._sender._find_coordinator = node
        open_with_identity(producer, identity)
        await producer._sender._maybe_wait_for_pid()
        return sent[-1]

    async def test_the_request_says_who_we_were_and_the_answer_who_we_are(self, producer: AIOKafkaProducer) -> None:
        request = await self.open(producer, ProducerIdentity(7, 3), (0, 0, 7, 4))
        assert (request.API_KEY, request.API_VERSION, request.FLEXIBLE_VERSION) == (22, 3, True)
        assert (request.transactional_id, request.producer_id, request.producer_epoch) == ("id", 7, 3)
        assert request.encode() == b"\x03id" + struct.pack(">iqh", 60_000, 7, 3) + b"\x00"
        assert identity_of(producer) == (7, 4)

    @pytest.mark.parametrize("code", [47, 90])
    async def test_the_broker_reports_a_newer_holder(self, producer: AIOKafkaProducer, code: int) -> None:
        with pytest.raises(ProducerFenced):
            await self.open(producer, ProducerIdentity(7, 3), (0, code, -1, -1))

    async def test_a_transaction_that_still_ends_is_waited_for(self, producer: AIOKafkaProducer) -> None:
        concurrent_transactions = 51
        await self.open(producer, ProducerIdentity(7, 3), (0, concurrent_transactions, -1, -1), (0, 0, 7, 4))
        assert identity_of(producer) == (7, 4)


async def test_features_are_read_from_the_tags_of_an_answer_with_the_old_header() -> None:
    features = b"\x03" + b"".join(b"\x06level" + struct.pack(">hh", 1, highest) + b"\x00" for highest in (7, 9))
    asked = []

    async def send(_node_id: int, request: Request[Any]) -> object:
        question = request.prepare({18: (0, 4)})
        asked.append(question)
        header = question.parse_response_header(struct.pack(">i", 5))
        assert header.correlation_id == 5
        body = struct.pack(">h", 0) + b"\x01" + struct.pack(">i", 0) + b"\x01\x00" + bytes([len(features)]) + features
        return question.RESPONSE_TYPE.decode(body)

    assert await supported_features(SimpleNamespace(send=send), 0) == {"level": 9}
    assert asked[0].API_VERSION == 3


async def test_the_next_request_is_on_its_way_before_the_caller_decodes(
    bootstrap_servers: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    topic, written = f"internals-{next(_numbers)}", []
    await create_topic(bootstrap_servers, topic, 1)
    bus = KafkaBus(KafkaSettings(bootstrap_servers=bootstrap_servers), limits=ClientLimits(fetch_max_wait_ms=500))
    publisher = await bus.publisher("writer")
    subscription = await bus.subscribe([topic], client_id="reader")
    consumer, send = subscription._consumer, AIOKafkaConnection.send

    def counting(connection: AIOKafkaConnection, request: Request[Any], **also: Any) -> Any:
        if isinstance(request, FetchRequest):
            written.append(request)
        return send(connection, request, **also)

    monkeypatch.setattr(AIOKafkaConnection, "send", counting)
    for number in range(10):
        await publisher.publish(Outgoing(topic, bytes([number]), None, 0))
        async with patience(10):
            while not consumer._fetcher._records or consumer._fetcher._in_flight:
                await asyncio.sleep(0.01)  # until the record lies in the buffer, and no request is under way
        before = len(written)
        fetched = await consumer.getmany(timeout_ms=5000)
        assert sum(map(len, fetched.values())) == 1
        assert len(written) == before, "the fetcher asks for more while the caller waits, not at once"
        await let_fetcher_request()
        assert len(written) == before + 1
    await subscription.close()
    await publisher.close()
