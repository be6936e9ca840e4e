from pathlib import Path

import pytest

from streamrl.bus.kafka.bus import KafkaBus
from streamrl.bus.kafka.settings import KafkaSettings
from streamrl.bus.memory import MemoryBus
from streamrl.bus.port import Bus, Record
from streamrl.observability.tracing.context import SpanContext, TraceSpan, context_of
from streamrl.schemas.codec import headers_of
from streamrl.schemas.topics import CONTROL, STEPS, TRAJECTORIES, WORK_ORDERS
from tests.broker_fixture import unique_numbers
from tests.contract.topics import create_topic
from tests.observability.tracing.traced_loop import TracedLoop, settings
from tests.schemas.examples import work_order

TOPICS = (WORK_ORDERS, TRAJECTORIES, STEPS, CONTROL)
_numbers = unique_numbers()


@pytest.fixture
def run() -> str:
    return f"traced-{next(_numbers)}"


@pytest.fixture
def memory_bus(run: str) -> MemoryBus:
    bus = MemoryBus()
    for topic in TOPICS:
        bus.create_topic(topic.full_name(run), 1)
    return bus


def by_name(spans: list[TraceSpan]) -> dict[str, TraceSpan]:
    found = {span.name: span for span in spans}
    assert len(found) == len(spans), "every span of the loop is exported once"
    return found


def parents(spans: dict[str, TraceSpan]) -> dict[str, str]:
    names = {span.context: name for name, span in spans.items()}
    return {name: names[span.parent] for name, span in spans.items() if span.parent is not None}


def assert_one_trace(loop: TracedLoop, records: dict[str, Record]) -> None:
    spans = by_name(loop.spans)
    assert parents(spans) == {
        "sample": "dispatch",
        "generate": "sample",
        "reward": "sample",
        "send trajectories": "sample",
        "train": "send trajectories",
        "announce weights": "optimizer step",
        "fetch weights": "announce weights",
        "adopt weights": "announce weights",
    }
    assert {span.context.trace_id for span in spans.values() if span.parent is not None or span.name == "dispatch"} == {
        spans["dispatch"].context.trace_id,
        spans["optimizer step"].context.trace_id,
    }
    assert spans["train"].context.trace_id == spans["dispatch"].context.trace_id
    assert list(spans["train"].links) == [spans["optimizer step"].context]
    assert list(spans["optimizer step"].links) == [spans["send trajectories"].context]
    for name in ("train", "optimizer step", "announce weights", "adopt weights"):
        assert spans[name].attributes["streamrl.policy.version"] == "2-4"
    sent = spans["send trajectories"].attributes
    assert (sent["messaging.system"], sent["messaging.destination.name"]) == ("kafka", loop.full(TRAJECTORIES))
    assert (sent["messaging.destination.partition.id"], sent["messaging.kafka.offset"]) == ("0", 0)
    generated = spans["generate"].attributes
    assert (generated["gen_ai.usage.output_tokens"], generated["streamrl.predicted_length"]) == (5, 128)
    assert generated["streamrl.policy.versions"] == ["1-20", "1-21"]
    assert spans["reward"].attributes["streamrl.reward.accuracy"] == 1.0
    for topic, name in (
        ("work-orders", "dispatch"),
        ("trajectories", "send trajectories"),
        ("steps", "optimizer step"),
        ("control", "announce weights"),
    ):
        assert context_of(records[topic].headers) == spans[name].context
        assert dict(records[topic].headers)["traceparent"].decode().startswith("00-")
    assert all(span.end_s >= span.start_s for span in spans.values())


async def test_one_trace_goes_around_the_loop_in_memory(run: str, memory_bus: MemoryBus, tmp_path: Path) -> None:
    loop = TracedLoop(memory_bus, settings(run))
    assert_one_trace(loop, await loop.play(tmp_path))


async def test_one_trace_goes_around_the_loop_on_kafka(run: str, bootstrap_servers: str, tmp_path: Path) -> None:
    for topic in TOPICS:
        await create_topic(bootstrap_servers, topic.full_name(run), 1)
    bus: Bus = KafkaBus(KafkaSettings(bootstrap_servers=bootstrap_servers))
    loop = TracedLoop(bus, settings(run))
    assert_one_trace(loop, await loop.play(tmp_path))


async def test_unsampled_traces_leave_no_header_and_no_span(run: str, memory_bus: MemoryBus, tmp_path: Path) -> None:
    loop = TracedLoop(memory_bus, settings(run), ratio=0.0)
    records = await loop.play(tmp_path)
    assert loop.spans == []
    for record in records.values():
        assert record.headers == headers_of(record.message())


async def test_the_dispatcher_alone_decides_what_is_sampled(run: str, memory_bus: MemoryBus, tmp_path: Path) -> None:
    """Others follow the header, whatever ratio they were started with."""
    loop = TracedLoop(memory_bus, settings(run), others=0.0)
    assert_one_trace(loop, await loop.play(tmp_path))


async def test_a_group_that_is_ordered_again_stays_in_its_trace(run: str, memory_bus: MemoryBus) -> None:
    loop = TracedLoop(memory_bus, settings(run))
    order = work_order("2 + 2")
    for attempt in (0, 1):
        await loop.commit(loop.role("dispatcher"), WORK_ORDERS, order.replace(attempt=attempt), order.group_id)
    first, second = loop.spans
    assert first.parent is None
    assert second.parent == first.context
    assert second.context != first.context


async def test_a_record_that_is_sent_again_carries_the_same_header(run: str, memory_bus: MemoryBus) -> None:
    loop, order = TracedLoop(memory_bus, settings(run)), work_order("2 + 2")
    contexts: set[SpanContext | None] = set()
    for _ in range(2):
        await loop.commit(loop.role("dispatcher"), WORK_ORDERS, order, order.group_id)
    for record in memory_bus.log(loop.full(WORK_ORDERS)).partitions[0]:
        contexts.add(context_of(record.headers))
    assert len(contexts) == 1
    assert contexts != {None}
