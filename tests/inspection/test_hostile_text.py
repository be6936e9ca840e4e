"""Every command that prints what stands on topics, given a run whose ids and texts are meant for a terminal to obey."""

import asyncio
import time
import uuid
from collections.abc import Callable
from io import StringIO

import pytest
from rich.console import Console

from streamrl.bus.kafka.bus import KafkaBus
from streamrl.bus.kafka.settings import KafkaSettings
from streamrl.bus.kafka.topic_admin import apply_topics
from streamrl.bus.port import Outgoing
from streamrl.deploy.local.watching import live_view
from streamrl.inspection.audit.command import audit_run, export_run
from streamrl.inspection.dead_letters import list_dead_letters, retry_dead_letters, show_dead_letter
from streamrl.inspection.diagnostics.connect import RunConnection
from streamrl.inspection.diagnostics.lag import show_lag
from streamrl.inspection.diagnostics.status import show_status
from streamrl.inspection.diagnostics.tail import TailRequest, tail
from streamrl.inspection.diagnostics.trace import show_trace
from streamrl.inspection.replay.command import ReplayRequest, replay
from streamrl.inspection.replay.show import show
from streamrl.inspection.terminal.command import LineOptions, show_top
from streamrl.observability.run_state.state import RunState
from streamrl.observability.tracing.context import SpanContext, TraceSpan
from streamrl.observability.tracing.exporting import open_exporting
from streamrl.observability.tracing.settings import TelemetrySettings
from streamrl.schemas.identifiers import PolicyVersion
from streamrl.schemas.reports import Heartbeat, RecordRef, SkipReason
from streamrl.schemas.topics import DEAD_LETTERS, HEARTBEATS, SKIPS, STEPS, TRAJECTORIES
from streamrl.settings.run_directory import RunDirectory
from tests.schemas.examples import example, examples, trajectory

HOSTILE = "\x1b]0;owned\x07\x1b[2J\x9b1;31m\u202e\r\nAN OWN LINE"
GROUP = f"p{HOSTILE}/7/0"
NAME = f"{GROUP}/0"
WORKER = f"worker{HOSTILE}"


@pytest.fixture(scope="module")
def hostile_run(bootstrap_servers: str, tmp_path_factory: pytest.TempPathFactory) -> tuple[RunDirectory, RunConnection]:
    run = f"hostile-{uuid.uuid4().hex[:8]}"
    directory = RunDirectory(tmp_path_factory.mktemp("hostile") / run)
    directory.create()
    directory.config.write_text(
        f'[run]\nname = "{run}"\n[model]\npath = "{directory.logs}"\n[data]\npath = "absent"\n'
        f'[kafka]\nbootstrap_servers = "{bootstrap_servers}"\n'
    )
    asyncio.run(_write(bootstrap_servers, run))
    exporting = open_exporting(TelemetrySettings(traces="file"), directory.path, "dispatcher", "dispatcher")
    attributes = {"streamrl.group_id": GROUP, "streamrl.worker_id": WORKER}
    exporting.record(TraceSpan("dispatch", SpanContext(0xA, 1), None, 100.0, 100.5, attributes=attributes))
    exporting.close()
    return directory, RunConnection(KafkaSettings(bootstrap_servers=bootstrap_servers), run)


async def _write(servers: str, run: str) -> None:
    await apply_topics(servers, run, 1)
    publisher = await KafkaBus(KafkaSettings(bootstrap_servers=servers)).publisher("stranger")
    example, now = examples(), time.time()
    message = trajectory(5).replace(
        trajectory_id=NAME, group_id=GROUP, worker_id=WORKER, prompt_text=HOSTILE, completion_text=HOSTILE,
        dataset=HOSTILE, reward_errors={f"r{HOSTILE}": HOSTILE},
    )  # fmt: skip
    await publisher.publish(Outgoing.of(TRAJECTORIES.full_name(run), message, key=GROUP, partition=0))
    step = example["step-report"].replace(
        step=1, version=PolicyVersion(1, 1), parent=None, finished=False, sent_at=now, group_ids=(GROUP,),
        micro_batches=((RecordRef(f"another{HOSTILE}", 0, 0),),),
    )  # fmt: skip
    await publisher.publish(Outgoing.of(STEPS.full_name(run), step, key="grpo"))
    skip = example["skip"].replace(
        trajectory_id=NAME, partition=0, offset=0, reason=SkipReason.FILTERED, detail=HOSTILE, lineage=1, sequence=1
    )
    await publisher.publish(Outgoing.of(SKIPS.full_name(run), skip, key=NAME))
    beat = example["heartbeat"].replace(worker_id=WORKER, sent_at=now)
    await publisher.publish(Outgoing.of(HEARTBEATS.full_name(run), beat, key=WORKER))
    headers = (("dlq-error-class", HOSTILE.encode()), ("dlq-error", HOSTILE.encode()), ("dlq-topic", HOSTILE.encode()))
    await publisher.publish(Outgoing(DEAD_LETTERS.full_name(run), HOSTILE.encode(), HOSTILE, 0, headers))
    await publisher.close()


COMMANDS: dict[str, Callable[[RunDirectory, RunConnection], object]] = {
    "audit": lambda run, _: audit_run(run.path, None, as_json=False),
    "audit --json": lambda run, _: audit_run(run.path, None, as_json=True),
    "dlq ls": lambda run, _: list_dead_letters(run.path, None, None, None, json_lines=False),
    "dlq show": lambda run, _: show_dead_letter(run.path, None, 0),
    "dlq retry": lambda run, _: retry_dead_letters(run.path, [], everything=True, dry_run=True, force=False),
    "export": lambda run, _: export_run(run.path, run.path / "out", "jsonl", []),
    "show": lambda run, _: show(NAME, run.path, None, json=False),
    "show --json": lambda run, _: show(NAME, run.path, None, json=True),
    "replay": lambda run, _: replay(ReplayRequest(run=run.path)),
    "trace": lambda run, _: show_trace(GROUP, run.path, as_json=False),
    "status": lambda _, connection: show_status(connection, as_json=False),
    "lag": lambda _, connection: show_lag(connection, 0.0, as_json=False),
    "tail trajectories": lambda _, connection: tail(connection, TailRequest("trajectories")),
    "tail skips": lambda _, connection: tail(connection, TailRequest("skips")),
    "top --once": lambda _, connection: show_top(connection, None, LineOptions(once=True), on_screen=False),
    "top --once --json": lambda _, connection: show_top(
        connection, None, LineOptions(once=True, as_json=True), on_screen=False
    ),
}


@pytest.mark.parametrize("command", COMMANDS)
def test_no_command_prints_what_a_terminal_would_obey(
    command: str, hostile_run: tuple[RunDirectory, RunConnection], capfd: pytest.CaptureFixture[str]
) -> None:
    COMMANDS[command](*hostile_run)
    out, err = capfd.readouterr()
    assert out
    obeyed = {each for each in (out + err).replace("\n", "") if not each.isprintable()}
    assert not obeyed, out + err
    assert not [line for line in out.splitlines() if line.startswith("AN OWN LINE")], "a text began a line of its own"


def test_the_runs_own_view_names_workers_as_they_are_written() -> None:
    state = RunState("r")
    state.processes.workers[WORKER] = example("heartbeat", Heartbeat).replace(worker_id=WORKER, sent_at=time.time())
    text = StringIO()
    Console(file=text, width=200).print(live_view(state, 10, {}, time.time()))
    shown = text.getvalue()
    assert "owned" in shown
    assert not [each for each in shown.replace("\n", "") if not each.isprintable()]
