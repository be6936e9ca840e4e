import asyncio
import gc
import socket
import ssl
import struct
import threading
import time
from collections.abc import AsyncIterator, Iterator
from contextlib import ExitStack, contextmanager, nullcontext, suppress
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import pytest
from aiokafka import client
from aiokafka.conn import AIOKafkaConnection, collect_hosts
from aiokafka.errors import KafkaConnectionError, TopicAuthorizationFailedError, UnsupportedSaslMechanismError
from aiokafka.protocol.metadata import MetadataRequest, MetadataRequest_v4
from structlog.testing import capture_logs

from streamrl.bus.kafka import connection
from streamrl.bus.kafka.bus import KafkaBus
from streamrl.bus.kafka.connection import BUSY, BrokerAvailability, ProcessorWait, topics_named, with_advice
from streamrl.bus.kafka.limits import LIMITS, ClientLimits
from streamrl.bus.kafka.settings import KafkaSettings
from streamrl.schemas.errors import (
    BrokerError,
    BusError,
    BusUnavailable,
    SettingsError,
    StreamRLError,
    TopicMissing,
    UserError,
)
from streamrl.schemas.secrets import MASK
from tests.pipeline.secure_broker import certified
from tests.progress import calm_s, patience


@pytest.fixture
async def silent_listener() -> AsyncIterator[str]:
    """Takes connections and never answers."""
    held: list[asyncio.StreamWriter] = []
    server = await asyncio.start_server(lambda _reader, writer: held.append(writer), "127.0.0.1", 0)
    yield f"127.0.0.1:{server.sockets[0].getsockname()[1]}"
    for writer in held:
        writer.close()
    server.close()
    await server.wait_closed()


@pytest.mark.parametrize("opens", ["publisher", "subscription"])
async def test_a_refused_connection_is_one_line_at_once(opens: str, caplog: pytest.LogCaptureFixture) -> None:
    began = calm_s()
    with pytest.raises(BusUnavailable) as caught:
        await _open(opens, KafkaSettings(bootstrap_servers="127.0.0.1:1"))
    assert calm_s() - began < 1
    assert isinstance(caught.value, BrokerError)
    assert caught.value.exit_code == UserError.exit_code
    assert "127.0.0.1:1" in str(caught.value)
    assert "streamrl kafka up" in str(caught.value)
    assert "\n" not in str(caught.value)
    assert not caplog.records


@pytest.mark.parametrize("opens", ["publisher", "subscription"])
async def test_a_listener_that_never_answers_is_given_up_within_five_seconds(opens: str, silent_listener: str) -> None:
    began = calm_s()
    with pytest.raises(BusUnavailable, match="no answer"):
        await _open(opens, KafkaSettings(bootstrap_servers=silent_listener), ClientLimits(connect_timeout_s=1.0))
    assert calm_s() - began < 2
    assert LIMITS.connect_timeout_s < 5


async def test_a_silent_broker_address_does_not_delay_the_connection(
    silent_listener: str, bootstrap_servers: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    in_order = partial(collect_hosts, randomize=False)
    monkeypatch.setattr(connection, "collect_hosts", in_order)  # the last is asked first
    monkeypatch.setattr(client, "collect_hosts", in_order)
    monkeypatch.setattr(connection, "SILENT_AFTER_S", 0.1)
    both = KafkaSettings(bootstrap_servers=f"{bootstrap_servers},{silent_listener}")
    began, calm = time.monotonic(), calm_s()
    await (await KafkaBus(both, limits=ClientLimits(connect_timeout_s=2.0)).publisher("writer")).close()
    assert time.monotonic() - began > 0.1
    assert calm_s() - calm < 1.5


@pytest.mark.parametrize("address", ["no-such-host.invalid:9092", "::bad::", "127.0.0.1:1,127.0.0.1:2"])
async def test_an_address_that_leads_nowhere_is_a_broker_error(address: str) -> None:
    with pytest.raises(BrokerError):
        await _open("publisher", KafkaSettings(bootstrap_servers=address))


async def test_no_address_at_all_says_which_setting_to_set() -> None:
    with pytest.raises(BrokerError, match=r"kafka\.bootstrap_servers"):
        await _open("publisher", KafkaSettings())


async def test_unreadable_certificates_are_named() -> None:
    settings = KafkaSettings.model_validate(
        {"bootstrap_servers": "127.0.0.1:1", "security_protocol": "SSL", "ssl_cafile": "no/such/file.pem"}
    )
    with pytest.raises(BrokerError, match=r"kafka\.ssl_"):
        await _open("publisher", settings)


def test_a_key_with_a_pass_phrase_opens_with_the_right_one_and_never_asks(tmp_path: Path) -> None:
    key, authority = certified(tmp_path, "phrase")
    given = {"bootstrap_servers": "b:1", "security_protocol": "SSL", "ssl_certfile": key, "ssl_keyfile": key}
    given["ssl_cafile"] = authority
    assert connection.client_options(KafkaSettings.model_validate(given | {"ssl_key_password": "phrase"}), "c")
    for wrong in ({}, {"ssl_key_password": "canary"}):
        with pytest.raises(
            BrokerError, match="for a key with a pass phrase, STREAMRL_KAFKA__SSL_KEY_PASSWORD"
        ) as caught:
            connection.client_options(KafkaSettings.model_validate(given | wrong), "c")
        assert "canary" not in str(caught.value)


@contextmanager
def deaf_to_farewells(folder: Path) -> Iterator[tuple[str, Path]]:
    """Lets clients in under TLS, knows no way to log in, and never hears one go; its address and certificate."""
    key, authority = certified(folder)
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    context.load_cert_chain(key)
    versions = struct.pack(">hi3h3h", 0, 2, 17, 0, 1, 36, 0, 1)
    no_such_login = struct.pack(">hi", 33, 0)

    def serve(held: ExitStack) -> None:
        with suppress(OSError):
            while True:
                client = held.enter_context(context.wrap_socket(listener.accept()[0], server_side=True))
                for answer in (versions, no_such_login):
                    if not (size := client.recv(4)):
                        break
                    request = client.recv(struct.unpack(">i", size)[0])
                    client.sendall(struct.pack(">i", 4 + len(answer)) + request[4:8] + answer)

    with socket.create_server(("127.0.0.1", 0)) as listener, ExitStack() as held:
        thread = threading.Thread(target=serve, args=(held,), daemon=True)
        thread.start()
        yield f"127.0.0.1:{listener.getsockname()[1]}", authority
        listener.shutdown(socket.SHUT_RDWR)
    thread.join(10)


@pytest.mark.parametrize("login", [{}, {"sasl_plain_username": "u", "sasl_plain_password": "p"}])
def test_a_login_check_leaves_no_connection_open(login: dict[str, str], tmp_path: Path) -> None:
    """What is open as the event loop ends stays open; pytest fails a test in which something open is collected."""
    given = login | (
        {"security_protocol": "SASL_SSL", "sasl_mechanism": "PLAIN"} if login else {"security_protocol": "SSL"}
    )
    with deaf_to_farewells(tmp_path) as (address, authority):
        settings = KafkaSettings.model_validate(given | {"bootstrap_servers": address, "ssl_cafile": str(authority)})
        refused = pytest.raises(UnsupportedSaslMechanismError) if login else nullcontext()
        with refused:
            asyncio.run(connection._find_listener(address, settings))
    gc.collect()


@pytest.mark.parametrize("password", [None, MASK])
async def test_a_password_that_is_not_there_is_named_with_its_variable(password: str | None) -> None:
    given = {"bootstrap_servers": "127.0.0.1:1", "security_protocol": "SASL_PLAINTEXT", "sasl_plain_username": "me"}
    settings = KafkaSettings.model_validate(given | {"sasl_plain_password": password})
    with pytest.raises(SettingsError, match=r"kafka\.sasl_plain_password.* set STREAMRL_KAFKA__SASL_PLAIN_PASSWORD"):
        await _open("publisher", settings)


def test_a_password_does_not_show_in_printed_settings() -> None:
    settings = KafkaSettings.model_validate({"sasl_plain_password": "hunter2"})
    assert "hunter2" not in f"{settings!r}{settings.model_dump_json()}"


def test_a_silent_broker_is_logged_once_and_so_is_its_return() -> None:
    availability = BrokerAvailability("b:1", "start it again")
    with capture_logs() as logs:
        availability.report_answer("reader")
        for _ in range(2):
            for client in ("reader", "other"):
                availability.report_silence(client, BusUnavailable("no answer"))
            for client in ("reader", "other"):
                availability.report_answer(client)
    assert [each["event"] for each in logs] == [
        "the broker at b:1 does not answer; start it again",
        "the broker at b:1 answers again",
    ] * 2
    assert {each["log_level"] for each in logs} == {"warning"}
    assert logs[0]["error"] == "no answer"


def test_a_request_sent_before_the_last_answer_reports_no_outage() -> None:
    availability = BrokerAvailability("b:1")
    with capture_logs() as logs:
        asked_at = time.monotonic()
        availability.report_silence("reader", BusUnavailable("no answer"), asked_at)
        availability.report_answer("reader")
        availability.report_silence("other", BusUnavailable("no answer"), asked_at)
        assert len(logs) == 2
        availability.report_silence("other", BusUnavailable("no answer"), availability.answered_at + 1.0)
    assert len(logs) == 3


def test_a_process_without_processor_time_does_not_blame_the_broker() -> None:
    waited, now = [0.0], [0.0]
    processor = ProcessorWait(lambda: waited[0], lambda: now[0])
    found = BrokerAvailability("b:1", "start it again", processor=processor)
    now[0], waited[0] = 10.0, 4.0
    assert found.message == "the broker at b:1 does not answer; start it again"
    waited[0] = 6.0
    assert found.message == f"the broker at b:1 is not heard; {BUSY}"
    with capture_logs():
        found.report_answer("ui")
    now[0] = 20.0
    assert found.explanation == "start it again"
    assert ProcessorWait().is_starved is False


@pytest.mark.parametrize(
    ("error", "text"),
    [
        (BusUnavailable("no answer"), "no answer; start it"),
        (TopicMissing("no topic"), "no topic"),
        (BusError("refused"), "refused"),
    ],
)
def test_only_a_silent_broker_gets_the_advice(error: StreamRLError, text: str) -> None:
    assert with_advice(error, "start it") == text
    assert with_advice(error, "") == str(error)


async def _open(what: str, settings: KafkaSettings, limits: ClientLimits = LIMITS) -> None:
    bus = KafkaBus(settings, limits=limits)
    if what == "publisher":
        await bus.publisher("writer")
    else:
        await bus.subscribe(["t"], client_id="reader")


async def test_a_client_that_ignores_its_end_is_left_to_itself(monkeypatch: pytest.MonkeyPatch) -> None:
    class Stubborn:
        def __init__(self) -> None:
            self.released, self.done = asyncio.Event(), asyncio.Event()

        async def stop(self) -> None:
            with suppress(asyncio.CancelledError):
                await self.released.wait()
            await self.released.wait()
            self.done.set()
            raise RuntimeError("nobody wants to know")

    monkeypatch.setattr(connection, "FORCED_CLOSE_TIMEOUT_S", 0.1)
    client = Stubborn()
    async with patience(5):
        await connection.discard(client, 0.1)
    assert not client.done.is_set()
    client.released.set()
    await client.done.wait()


async def test_a_start_that_is_not_wanted_any_more_has_ended_however_often_it_is_cancelled() -> None:
    begun, ended = asyncio.Event(), list[str]()

    class Starting:
        async def start(self) -> None:
            begun.set()
            try:
                await asyncio.Event().wait()
            finally:
                ended.append("start")

    starting = asyncio.create_task(connection._start(Starting()))
    await begun.wait()
    for _ in range(2):
        starting.cancel()
        await asyncio.sleep(0)
        await asyncio.sleep(0)
    async with patience(20):
        with pytest.raises(asyncio.CancelledError):
            await starting
    assert ended == ["start"]


async def test_a_broker_that_lists_none_yet_is_a_broker_that_is_away(bootstrap_servers: str) -> None:
    """As one does just after a restart; aiokafka then has a failed assertion, which would end the process."""

    class Starting:
        async def start(self) -> None:
            assert not bootstrap_servers, "Did we not perform bootstrap?"

        async def stop(self) -> None:
            pass

    settings = KafkaSettings(bootstrap_servers=bootstrap_servers)
    with pytest.raises(BusUnavailable, match="a list of no brokers"):
        await connection.started(Starting(), settings)


async def test_a_client_that_is_not_wanted_any_more_leaves_no_connection_open(
    bootstrap_servers: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As aiokafka asks its first broker for metadata: cancelled just then, it would forget that connection."""
    asked, send, open_ones = asyncio.Event(), AIOKafkaConnection.send, list[AIOKafkaConnection]()

    def noted(self: AIOKafkaConnection, request: object, *arguments: object, **options: object) -> object:
        if "Metadata" in type(request).__name__:
            open_ones.append(self)
            asked.set()
        return send(self, request, *arguments, **options)

    monkeypatch.setattr(AIOKafkaConnection, "send", noted)
    opening = asyncio.create_task(_open("subscription", KafkaSettings(bootstrap_servers=bootstrap_servers)))
    await asked.wait()
    opening.cancel()
    with suppress(asyncio.CancelledError):
        await opening
    assert open_ones
    assert not any(connection.connected() for connection in open_ones)


class Answers:
    """A client of two brokers: the first is gone, the second answers."""

    hosts = "127.0.0.1:1"

    def __init__(self, *codes: int) -> None:
        self.cluster = SimpleNamespace(brokers=lambda: [SimpleNamespace(nodeId=1), SimpleNamespace(nodeId=2)])
        self.codes, self.asked = codes, list[MetadataRequest]()

    async def send(self, node_id: int, request: MetadataRequest) -> object:
        self.asked.append(request)
        if node_id == 1:
            raise KafkaConnectionError("gone")
        topics = [{"error_code": code, "topic": f"t{code}", "partitions": [{}]} for code in self.codes]
        return SimpleNamespace(to_object=lambda: {"topics": topics})


async def test_topics_are_asked_for_by_name_of_a_broker_that_answers_and_none_is_made() -> None:
    asked: Any = Answers(0, 3, 5)
    assert list(await topics_named(asked, {"t0", "t3", "t5"})) == ["t0"]
    built = asked.asked[-1].build(MetadataRequest_v4)
    assert built.topics == ["t0", "t3", "t5"]
    assert built.allow_auto_topic_creation is False
    with pytest.raises(TopicAuthorizationFailedError, match="t29"):
        await topics_named(cast("Any", Answers(29)), ["t29"])


async def test_if_no_broker_answers_the_last_reason_is_raised() -> None:
    alone: Any = Answers()
    alone.cluster = SimpleNamespace(brokers=lambda: [SimpleNamespace(nodeId=1)])
    with pytest.raises(KafkaConnectionError, match="gone"):
        await topics_named(alone, [])
