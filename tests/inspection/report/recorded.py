"""Small recorded runs for reports: a directory as a run leaves it, and the topics it would have had."""

import itertools
import json
import random
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path

from streamrl.bus.history import BusHistory
from streamrl.bus.memory import MemoryBus
from streamrl.inspection.report.gathering import gather_topics
from streamrl.inspection.report.record import RunFacts, write_facts
from streamrl.schemas.reports import StepReport
from streamrl.schemas.topics import STEPS, TRAJECTORIES
from streamrl.schemas.trajectories import OrderingChance, Trajectory, WorkOrder
from streamrl.settings.run_directory import RunDirectory
from tests.observability.run_state.made_up_run import Happening, MadeUpRun
from tests.observability.run_state.writing import append, topics_of

BEGIN = 1_790_000_000.0
PHASES = ("wait_for_batch", "forward_backward", "optimizer", "broadcast_weights")
CONFIG = """
[run]
name = "{name}"
seed = {seed}
[algorithm]
name = "grpo"
[loop]
mode = "trajectory_async"
max_staleness = {seed}
[data]
path = "absent"
[model]
path = "absent"
"""


@dataclass(frozen=True)
class Recorded:
    """``bus`` holds the topics of a run of this name."""

    directory: RunDirectory
    name: str
    bus: MemoryBus

    @property
    def history(self) -> BusHistory:
        return BusHistory(self.bus)


def record_run(
    path: Path, *, seed: int = 1, seconds: float = 60.0, completion: str | None = None, has_values: bool = False
) -> Recorded:
    """A run of so many seconds.

    ``completion``: a text that every completion ends with; ``has_values``: it ordered prompts by their values.
    """
    directory, name = RunDirectory(path), path.name
    directory.create()
    directory.config.write_text(CONFIG.format(name=name, seed=seed))
    bus, reports, adopted = topics_of(name), [], dict[str, list[str]]()
    made = MadeUpRun(BEGIN, seed=seed, workers=3)
    for happening in itertools.takewhile(lambda each: each.at < BEGIN + seconds, made.happenings()):
        append(bus, name, _with_values(_with_text(happening, completion), has_values=has_values))
        if happening.topic is STEPS and isinstance(happening.message, StepReport):
            reports.append(happening.message)
        for worker, version in made.held.items():
            told = adopted.setdefault(worker, [])
            if not told or not told[-1].endswith(f"version=1-{version} worker={worker}"):
                told.append(_adopted(happening.at, version, worker))
    for worker, lines in adopted.items():
        (directory.logs / f"{worker}.log").write_text("\n".join(["timestamp=broken", *lines]) + "\n")
    directory.metrics.write_text("".join(json.dumps(row) + "\n" for row in _rows(reports, seed)))
    directory.summary.write_text(json.dumps({"exact_match_before": 0.25, "exact_match_after": 0.75, "skipped": {}}))
    return Recorded(directory, name, bus)


async def gather(recorded: Recorded, **kept: str) -> Recorded:
    """Also what the run's end would have kept."""
    topics = await gather_topics(recorded.history, recorded.name, recorded.directory.logs, {})
    evaluated = {
        "before": ({"prompt": "p", "completion": "<b>wrong</b>"},),
        "after": ({"prompt": "p", "correct": True},),
    }
    gathered = RunFacts(environment={"CPU": "made up", **kept}, evaluated=evaluated, topics=topics)
    write_facts(recorded.directory.gathered, gathered)
    return recorded


def _with_text(happening: Happening, completion: str | None) -> Happening:
    if completion is None or happening.topic is not TRAJECTORIES:
        return happening
    return happening._replace(message=happening.message.model_copy(update={"completion_text": completion}))


def _with_values(happening: Happening, *, has_values: bool) -> Happening:
    message = happening.message
    if not has_values or not isinstance(message, Trajectory | WorkOrder):
        return happening
    number = int(message.group_id.split("/")[1])
    chance = OrderingChance(probability=0.25 if number % 2 else 1.0, zero_advantage=0.4, alike="toy/13")
    changes: dict[str, object] = {"chance": chance}
    if isinstance(message, WorkOrder):
        # As if a second prompt was passed over before each.
        changes["decided"] = ((2 * number, 0.0), (2 * number + 1, chance.probability))
    return happening._replace(message=message.model_copy(update=changes))


def _adopted(at: float, version: int, worker: str) -> str:
    when = datetime.fromtimestamp(at, UTC).isoformat().replace("+00:00", "Z")
    return f'timestamp={when} level=info event="weights adopted" version=1-{version} worker={worker}'


def _rows(reports: list[StepReport], seed: int) -> list[dict[str, object]]:
    """The trainer's lines: what the reports say, and what the made-up run leaves out."""
    dice, rows = random.Random(seed), []
    for report in reports:
        at = report.sent_at - sum(report.metrics[f"time/{phase}"] for phase in PHASES)
        spans = []
        for phase in PHASES:
            spans.append([phase, at, at + report.metrics[f"time/{phase}"]])
            at += report.metrics[f"time/{phase}"]
        more = {
            "ledger/trained": float(sum(map(len, report.micro_batches))),
            "completions/num_tokens": report.metrics["completions/mean_length"] * 64,
            "reward_std": dice.uniform(0.2, 0.3),
            "loss": dice.gauss(0, 0.01),
            "grad_norm": dice.lognormvariate(0, 0.2),
            "entropy": dice.uniform(0.9, 1.0),
            "padding/all": dice.uniform(0.05, 0.1),
            "padding/bucket_0": dice.uniform(0.1, 0.3),
        }
        rows.append({"step": report.step, "time": report.sent_at, **report.metrics, **more, "spans": spans})
    return rows
