"""A whole run with tracing on: one trace from the prompt to the optimizer step and the weights that came of it."""

from pathlib import Path

import pytest

from streamrl.bus.kafka.bus import KafkaBus
from streamrl.bus.kafka.settings import KafkaSettings
from streamrl.inspection.diagnostics.trace import find
from streamrl.observability.tracing.context import context_of
from streamrl.observability.tracing.span_files import ExportedSpan, span_tree
from streamrl.schemas.topics import TRAJECTORIES
from streamrl.schemas.trajectories import Trajectory
from tests.pipeline.accounts import read_accounts, read_all
from tests.pipeline.emulated import EmulatedRun
from tests.pipeline.local_run import LocalRun

pytestmark = pytest.mark.timeout(400)


async def test_one_trace_follows_a_prompt_to_the_step_and_its_weights(emulated_run: EmulatedRun) -> None:
    run, name = emulated_run, emulated_run.directory.name
    accounts = await read_accounts(run.servers, name)
    first = accounts.steps[0]
    ref = first.micro_batches[0][0]
    spans, steps = find(run.directory / "traces", ref.trajectory_id)
    assert [node.span.name for node in span_tree(spans)] == [
        "dispatch",
        "sample",
        "generate",
        "reward",
        "send trajectories",
        "train",
    ]
    train = named(spans, "train")
    assert train.attributes["messaging.kafka.offset"] == ref.offset
    assert (train.attributes["streamrl.step"], train.attributes["streamrl.policy.version"]) == (1, str(first.version))
    (step,) = steps
    assert named(step, "optimizer step").trace == train.links[0]
    assert set(named(step, "optimizer step").links) >= {spans[0].trace}
    assert len(named(step, "optimizer step").links) == 8, "one link for each group of the step"
    assert named(step, "announce weights").attributes["streamrl.policy.version"] == str(first.version)
    adopted = {span.process for span in step if span.name == "adopt weights"}
    assert adopted <= {"worker-0", "worker-1"}
    await the_headers_agree(run.servers, name, spans)
    the_logs_agree(run)


async def the_headers_agree(servers: str, run: str, spans: list[ExportedSpan]) -> None:
    sent = named(spans, "send trajectories")
    for record in await read_all(KafkaBus(KafkaSettings(bootstrap_servers=servers)), run, TRAJECTORIES):
        message, context = record.message(), context_of(record.headers)
        assert context is not None, "every group is sampled"
        if isinstance(message, Trajectory) and message.trajectory_id == sent.attributes["streamrl.trajectory_id"]:
            assert (context.trace, f"{context.span_id:016x}") == (sent.trace, sent.span)


def the_logs_agree(run: LocalRun) -> None:
    for process in ("dispatcher", "worker-0", "trainer", "coordinator"):
        text = (run.directory / "logs" / f"{process}.log").read_text()
        assert "traces ended" in text
        assert "lost=0" in text
        assert Path(run.directory / "traces" / f"{process}.jsonl").exists()


def named(spans: list[ExportedSpan], name: str) -> ExportedSpan:
    (found,) = [span for span in spans if span.name == name]
    return found
