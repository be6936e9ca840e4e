"""One run as its directory tells it: settings, summary, and ``metrics.jsonl`` as columns over optimizer steps.

Reads only; needs no broker. A line that a killed trainer left half written is passed over. Invariant
a_resumed_trainer_takes_its_steps_back: of steps taken again, the later lines count; the time of all counts.

``gathered.json`` has what a run's topics, its evaluation and its machine told at its end. Small, whatever the run.
"""

import json
import math
import tomllib
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple, TypeGuard

from pydantic import BaseModel, ConfigDict, JsonValue, ValidationError

from streamrl.observability.run_state.aggregates import LAG_PREFIX
from streamrl.schemas.errors import DataError
from streamrl.schemas.evaluation import EVALUATED
from streamrl.schemas.files import write_whole
from streamrl.settings.differences import flat

if TYPE_CHECKING:
    from streamrl.settings.run_directory import RunDirectory

WAIT = "time/wait_for_batch"


class _Part(BaseModel):
    model_config = ConfigDict(frozen=True, extra="ignore")


class WorkerActivity(_Part):
    """A worker: intervals in which it generated, and when it adopted which weights; seconds since the epoch."""

    generating: tuple[tuple[float, float], ...] = ()
    adopted: tuple[tuple[float, str], ...] = ()

    def busy_s(self, begin: float, end: float) -> float:
        """Seconds of generating between two moments."""
        return sum(max(0.0, min(last, end) - max(first, begin)) for first, last in self.generating)


class LengthFacts(_Part):
    """How good length estimates were.

    ``cells``: completions by class of predicted and of actual length, two classes for each doubling of tokens.
    ``recall``: of the longest 20 %, the mean over ``windows`` (time, recall, coverage) of equal count; ``constant``:
    the recall of saying the same for all; ``coverage``: share at or below the upper estimate; ``factor``: by which a
    prediction is typically off (geometric mean).
    """

    count: int
    cells: tuple[tuple[int, int, int], ...]
    recall: float | None
    constant: float | None
    coverage: float | None
    factor: float | None
    windows: tuple[tuple[float, float | None, float | None], ...] = ()


class SampleText(_Part):
    """A trajectory as people read it; texts cut to a few thousand characters."""

    trajectory_id: str
    prompt: str
    completion: str
    rewards: dict[str, float | None]
    tokens: int
    predicted: int
    versions: tuple[str, ...]
    worker: str


class TopicDigest(_Part):
    """Of the ``held`` trajectories on the topic, ``read`` were read, the newest. ``staleness``: trained ones by age.

    ``rewards``: of groups, the mean reward and which share of them had ended before (0 to 1). Of many the same are
    kept in every run, so that runs can be compared by prompts.
    """

    held: int
    read: int
    workers: dict[str, WorkerActivity] = {}
    lengths: LengthFacts | None = None
    staleness: dict[int, int] = {}
    rewards: dict[str, tuple[float, float]] = {}
    first: tuple[SampleText, ...] = ()
    last: tuple[SampleText, ...] = ()


class RunFacts(_Part):
    """``evaluated``: held-out samples by moment (before, after). ``topics`` None: they were not read."""

    environment: dict[str, str] = {}
    evaluated: dict[str, tuple[dict[str, JsonValue], ...]] = {}
    topics: TopicDigest | None = None


def read_facts(path: Path) -> RunFacts:
    """What was kept; nothing if the run kept none.

    Raises:
        DataError: the file is there and is none of ours.
    """
    try:
        return RunFacts.model_validate_json(path.read_bytes())
    except FileNotFoundError:
        return RunFacts()
    except (OSError, ValidationError) as error:
        first = " ".join(str(error).split())[:200]
        raise DataError(
            f"expected what a run gathered in {path}, got {first}; remove it and give --from-topics"
        ) from error


def write_facts(path: Path, facts: RunFacts) -> None:
    """Keep it, whole or not at all."""
    write_whole(path, facts.model_dump_json())


class TrainerSpan(NamedTuple):
    """The trainer did ``kind`` from ``start`` to ``end``, in seconds since the epoch."""

    kind: str
    start: float
    end: float


@dataclass(frozen=True)
class StepTable:
    """``metrics`` of each step, ascending; ``times``: when each ended, in seconds since ``began``.

    ``evaluations``: of held-out prompts, by the step whose weights were evaluated, ascending.
    """

    steps: tuple[int, ...] = ()
    times: tuple[float, ...] = ()
    metrics: tuple[Mapping[str, float], ...] = ()
    spans: tuple[TrainerSpan, ...] = ()
    began: float = 0.0
    evaluations: tuple[tuple[int, Mapping[str, float]], ...] = ()

    @property
    def seconds(self) -> float:
        """From the beginning of the first step to the end of the last."""
        return self.times[-1] if self.times else 0.0

    def keys(self, prefix: str) -> list[str]:
        """Names of metrics that begin so, sorted, the numbers in them by size."""
        found = {key for row in self.metrics for key in row if key.startswith(prefix)}
        return sorted(found, key=lambda key: (len(key), key))  # shorter ones first: bucket_9 before bucket_10

    def column(self, key: str) -> list[float | None]:
        """One value a step; none where the step does not tell."""
        return [row.get(key) for row in self.metrics]

    def known(self, key: str) -> list[float]:
        """The values of a column that are told."""
        return [value for value in self.column(key) if value is not None]

    def total(self, key: str) -> float:
        """Sum of a column."""
        return sum(self.known(key))


def read_rows(path: Path) -> StepTable:
    """The rows of a file; none if it holds none."""
    # A killed trainer may leave half a character; the lines before it are whole.
    with path.open(encoding="utf-8", errors="replace") as file:
        return rows_of(found for line in file if (found := _object(line)) is not None)


def rows_of(told: Iterable[Mapping[str, Any]]) -> StepTable:
    """Rows of the trainer's lines, in the order in which they were written."""
    kept: list[tuple[int, float, dict[str, float]]] = []
    spans: list[TrainerSpan] = []
    began = math.inf
    evaluations: dict[int, dict[str, float]] = {}
    for line in told:
        step, at = line.get("step"), line.get("time")
        # A line may be of another program, or cut. By ``type``, since ``true`` is an instance of int.
        if type(step) is not int or not _is_number(at):
            continue
        metrics = {
            key: float(value) for key, value in line.items() if key not in ("step", "time") and _is_number(value)
        }
        if EVALUATED in line:
            evaluations[step] = metrics  # weights of a step that was taken again, once more
            continue
        found = [span for each in _items(line.get("spans")) if (span := _span(each)) is not None]
        spans += found
        # A step is written at its end; the run began before its first one.
        began = min([began, float(at) - metrics.get("time/step", 0.0), *(span.start for span in found)])
        # What a resumed trainer took again replaces what it had undone.
        while kept and kept[-1][0] >= step:
            kept.pop()
        kept.append((step, float(at), metrics))
    if not kept:
        return StepTable()
    waits = any(WAIT in metrics for *_, metrics in kept)
    return StepTable(
        steps=tuple(step for step, _, _ in kept),
        times=tuple(at - began for _, at, _ in kept),
        metrics=tuple(_with_derived(metrics, waits=waits) for *_, metrics in kept),
        spans=tuple(sorted(spans, key=lambda span: span.start)),
        began=began,
        evaluations=tuple(sorted(evaluations.items())),
    )


def _with_derived(metrics: dict[str, float], *, waits: bool) -> dict[str, float]:
    """What follows from a step's metrics, under ``report/``. ``waits``: the run tells where it waited."""
    step_s = metrics.get("time/step", 0.0)
    derived: dict[str, float] = {}
    if lags := [value for key, value in metrics.items() if key.startswith(LAG_PREFIX)]:
        derived["report/lag"] = sum(lags)
    # Rates are over the step's own time: time between the steps of two starts is not the trainer's.
    if step_s > 0:
        for name, key in (("tokens_per_s", "completions/num_tokens"), ("trajectories_per_s", "ledger/trained")):
            if key in metrics:
                derived[f"report/{name}"] = metrics[key] / step_s
        if waits:
            # Waiting is measured by another clock than the step, and may come out a little longer.
            derived["report/wait_share"] = min(1.0, metrics.get(WAIT, 0.0) / step_s)
    return metrics | derived


def _object(line: str) -> dict[str, Any] | None:
    try:
        found = json.loads(line)
    except (ValueError, RecursionError):  # the latter for a line of very many brackets
        return None
    return found if isinstance(found, dict) else None


def _items(value: object) -> list[Any]:
    return value if isinstance(value, list) else []


def _span(told: Any) -> TrainerSpan | None:
    if not isinstance(told, list) or len(told) != 3 or not _is_number(told[1]) or not _is_number(told[2]):
        return None
    return TrainerSpan(str(told[0]), float(told[1]), float(told[2])) if told[2] > told[1] else None


def _is_number(value: object) -> TypeGuard[int | float]:
    # JSON as Python writes it may hold NaN and infinity, which no chart can draw.
    return isinstance(value, int | float) and not isinstance(value, bool) and math.isfinite(value)


@dataclass(frozen=True)
class RunRecord:
    """``name``: what a person calls it. ``config``: the settings' text, ``settings``: by dotted key."""

    name: str
    path: Path
    rows: StepTable
    summary: Mapping[str, Any] = field(default_factory=dict)
    config: str = ""
    settings: Mapping[str, Any] = field(default_factory=dict)
    facts: RunFacts = field(default_factory=RunFacts)

    @property
    def title(self) -> str:
        """The run's own name."""
        return str(self.settings.get("run.name") or self.name)


def read_record(directory: "RunDirectory", name: str) -> RunRecord:
    """What a directory holds; a run that took no step yet has no rows.

    Raises:
        DataError: a file is there and cannot be read.
    """
    try:
        config = directory.config.read_text() if directory.config.is_file() else ""
        summary = json.loads(directory.summary.read_text()) if directory.summary.is_file() else {}
        return RunRecord(
            name=name,
            path=directory.path,
            rows=read_rows(directory.metrics) if directory.metrics.is_file() else StepTable(),
            summary=summary if isinstance(summary, dict) else {},
            config=config,
            settings=flat(tomllib.loads(config)),
            facts=read_facts(directory.gathered),
        )
    except (OSError, UnicodeDecodeError, ValueError) as error:
        raise DataError(f"expected the files of a run in {directory.path}, got: {error}") from error
