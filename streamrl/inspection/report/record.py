"""Reads one run from its directory: settings, summary, and ``metrics.jsonl`` as columns over optimizer steps.

Reading needs no broker. A line that a killed trainer left incomplete is ignored. Invariant
a_resumed_trainer_takes_its_steps_back: if a step was taken again, its later line counts, and the time of both counts.

``gathered.json`` has data that was gathered at the run's end from its topics, its evaluation and its machine. It is
small for any run.
"""

import json
import math
import tomllib
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal, NamedTuple, TypeGuard

from pydantic import BaseModel, ConfigDict, JsonValue, ValidationError

from streamrl.observability.run_state.aggregates import LAG_PREFIX
from streamrl.schemas.errors import DataError
from streamrl.schemas.evaluation import EVALUATED
from streamrl.schemas.files import write_atomically
from streamrl.schemas.starts import RunStart, read_starts
from streamrl.settings.differences import flat

if TYPE_CHECKING:
    from streamrl.settings.run_directory import RunDirectory

WAIT = "time/wait_for_batch"


class _Part(BaseModel):
    model_config = ConfigDict(frozen=True, extra="ignore")


class WorkerActivity(_Part):
    """A worker's intervals of generating, and the times at which it adopted versions; in seconds since the epoch."""

    generating: tuple[tuple[float, float], ...] = ()
    adopted: tuple[tuple[float, str], ...] = ()

    def busy_s(self, begin: float, end: float) -> float:
        """Seconds of generating between ``begin`` and ``end``."""
        return sum(max(0.0, min(last, end) - max(first, begin)) for first, last in self.generating)


class LengthFacts(_Part):
    """The quality of length estimates.

    ``cells``: (class of predicted length, class of actual length, completions), with two classes for each doubling of
    tokens. ``windows``: (time, recall, coverage), each of equally many completions. ``recall``: of the longest 20 %,
    the mean over the windows; ``constant``: the recall of a constant prediction; ``coverage``: share of lengths at or
    below the upper estimate; ``factor``: the typical error of a prediction (geometric mean).
    """

    count: int
    cells: tuple[tuple[int, int, int], ...]
    recall: float | None
    constant: float | None
    coverage: float | None
    factor: float | None
    windows: tuple[tuple[float, float | None, float | None], ...] = ()


class PromptAsked(_Part):
    """A prompt that is ordered with a low probability, and why.

    ``predicted``: the chance that all samples of its next group earn the same. ``alike``: the prompts that the
    prediction started from. Of its ``groups``, ``equal`` had no advantage; ``reward``: their mean reward.
    """

    prompt_id: str
    probability: float
    predicted: float
    alike: str
    groups: int
    equal: int
    reward: float


class ValueFacts(_Part):
    """How often prompts were ordered, and the quality of the predictions behind that.

    ``predicted`` and ``observed``: share of the groups without advantage. ``error``: the mean distance of predictions
    from what happened. ``cells``: (mean prediction, observed share, groups) by range of predictions. ``windows``:
    (time, mean prediction, observed share), each of equally many groups. Of ``decided`` prompts, ``passed_over`` were
    not ordered. ``rare``: the prompts with the lowest probabilities.
    """

    groups: int
    predicted: float
    observed: float
    error: float
    cells: tuple[tuple[float, float, int], ...]
    windows: tuple[tuple[float, float, float], ...] = ()
    decided: int = 0
    passed_over: int = 0
    rare: tuple[PromptAsked, ...] = ()


class SampleText(_Part):
    """A trajectory for people to read, with texts cut to a few thousand characters."""

    trajectory_id: str
    prompt: str
    completion: str
    rewards: dict[str, float | None]
    tokens: int
    predicted: int
    versions: tuple[str, ...]
    worker: str


class RunMark(_Part):
    """A moment that may explain a jump in a curve: the trainer was replaced, or another policy is served."""

    at: float
    kind: Literal["restart", "promotion"]
    text: str


class TopicDigest(_Part):
    """A summary of a run's topics. Of ``held`` trajectories on the topic, the newest ``read`` were read.

    ``ends``: the offset after the last trajectory, by partition.

    ``staleness``: trained trajectories by age in steps; ``rewards``: by group, the mean reward, and the share of groups
    that had ended before it (0 to 1). If there are many groups, every run keeps the same ones, so that runs can be
    compared by prompts.
    """

    held: int
    read: int
    ends: dict[int, int] = {}
    workers: dict[str, WorkerActivity] = {}
    lengths: LengthFacts | None = None
    value: ValueFacts | None = None
    staleness: dict[int, int] = {}
    marks: tuple[RunMark, ...] = ()
    rewards: dict[str, tuple[float, float]] = {}
    first: tuple[SampleText, ...] = ()
    last: tuple[SampleText, ...] = ()


class RunFacts(_Part):
    """Data gathered at a run's end. ``evaluated``: held-out samples by moment (before, after). ``topics`` None: they
    were not read.
    """

    environment: dict[str, str] = {}
    evaluated: dict[str, tuple[dict[str, JsonValue], ...]] = {}
    topics: TopicDigest | None = None


def read_facts(path: Path) -> RunFacts:
    """The gathered data; empty if there is no file.

    Raises:
        DataError: the file exists but is not one of ours.
    """
    try:
        return RunFacts.model_validate_json(path.read_bytes())
    except FileNotFoundError:
        return RunFacts()
    except (OSError, ValidationError) as error:
        first = " ".join(str(error).split())[:200]
        raise DataError(
            f"expected the gathered data of a run in {path}, got {first}; remove the file and use --from-topics"
        ) from error


def write_facts(path: Path, facts: RunFacts) -> None:
    """Write the data, completely or not at all."""
    write_atomically(path, facts.model_dump_json())


class TrainerSpan(NamedTuple):
    """A phase ``kind`` of the trainer, from ``start`` to ``end`` in seconds since the epoch."""

    kind: str
    start: float
    end: float


@dataclass(frozen=True)
class StepTable:
    """``metrics`` by step, ascending; ``times``: the end of each step, in seconds since ``began``.

    ``evaluations``: results on held-out prompts, by the step whose weights were evaluated, ascending.
    """

    steps: tuple[int, ...] = ()
    times: tuple[float, ...] = ()
    metrics: tuple[Mapping[str, float], ...] = ()
    spans: tuple[TrainerSpan, ...] = ()
    began: float = 0.0
    evaluations: tuple[tuple[int, Mapping[str, float]], ...] = ()

    @property
    def seconds(self) -> float:
        """Seconds from the start of the first step to the end of the last."""
        return self.times[-1] if self.times else 0.0

    def keys(self, prefix: str) -> list[str]:
        """Sorted names of metrics that start with ``prefix``; numbers in them are sorted by size."""
        found = {key for row in self.metrics for key in row if key.startswith(prefix)}
        return sorted(found, key=lambda key: (len(key), key))  # shorter ones first: bucket_9 before bucket_10

    def column(self, key: str) -> list[float | None]:
        """One value per step; None if the step does not have the metric."""
        return [row.get(key) for row in self.metrics]

    def known(self, key: str) -> list[float]:
        """The values of a column that are not None."""
        return [value for value in self.column(key) if value is not None]

    def total(self, key: str) -> float:
        """Sum of a column."""
        return sum(self.known(key))


def read_rows(path: Path) -> StepTable:
    """The steps in a file; empty if it has none."""
    # A killed trainer may leave half a character, but the lines before it are complete.
    with path.open(encoding="utf-8", errors="replace") as file:
        return rows_of(found for line in file if (found := _object(line)) is not None)


def rows_of(lines: Iterable[Mapping[str, Any]]) -> StepTable:
    """The steps in the trainer's lines. ``lines``: in the order in which they were written."""
    kept: list[tuple[int, float, dict[str, float]]] = []
    spans: list[TrainerSpan] = []
    began = math.inf
    evaluations: dict[int, dict[str, float]] = {}
    for line in lines:
        step, at = line.get("step"), line.get("time")
        # A line may be from another program, or cut. ``type`` rather than ``isinstance``, since ``True`` is an int.
        if type(step) is not int or not _is_number(at):
            continue
        metrics = {
            key: float(value) for key, value in line.items() if key not in ("step", "time") and _is_number(value)
        }
        if EVALUATED in line:
            evaluations[step] = metrics  # a later line of the same step replaces the earlier one
            continue
        found = [span for each in _items(line.get("spans")) if (span := _span(each)) is not None]
        spans += found
        # A step's line has the time of its end, so the run started before its first line.
        began = min([began, float(at) - metrics.get("time/step", 0.0), *(span.start for span in found)])
        # Steps that a resumed trainer takes again replace the undone ones, whose weights' evaluations are undone, too.
        if kept and kept[-1][0] >= step:
            evaluations = {at_step: result for at_step, result in evaluations.items() if at_step < step}
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
    """A step's metrics, with derived ones under ``report/``. ``waits``: whether the run measures waiting."""
    step_s = metrics.get("time/step", 0.0)
    derived: dict[str, float] = {}
    if lags := [value for key, value in metrics.items() if key.startswith(LAG_PREFIX)]:
        derived["report/lag"] = sum(lags)
    # Rates are over the step's own time: the time between two starts of the trainer does not count.
    if step_s > 0:
        for name, key in (("tokens_per_s", "completions/num_tokens"), ("trajectories_per_s", "ledger/trained")):
            if key in metrics:
                derived[f"report/{name}"] = metrics[key] / step_s
        if waits:
            # Waiting is measured with another clock than the step, and may be a little longer.
            derived["report/wait_share"] = min(1.0, metrics.get(WAIT, 0.0) / step_s)
    return metrics | derived


def _object(line: str) -> dict[str, Any] | None:
    try:
        found = json.loads(line)
    except (ValueError, RecursionError):  # RecursionError: a line of very many brackets
        return None
    return found if isinstance(found, dict) else None


def _items(value: object) -> list[Any]:
    return value if isinstance(value, list) else []


def _span(item: Any) -> TrainerSpan | None:
    if not isinstance(item, list) or len(item) != 3 or not _is_number(item[1]) or not _is_number(item[2]):
        return None
    return TrainerSpan(str(item[0]), float(item[1]), float(item[2])) if item[2] > item[1] else None


def _is_number(value: object) -> TypeGuard[int | float]:
    # JSON that Python writes may contain NaN and infinity, which no chart can draw.
    return isinstance(value, int | float) and not isinstance(value, bool) and math.isfinite(value)


@dataclass(frozen=True)
class RunRecord:
    """A run's recorded data. ``name``: for display; ``config``: the settings as text; ``settings``: by dotted key."""

    name: str
    path: Path
    rows: StepTable
    summary: Mapping[str, Any] = field(default_factory=dict)
    config: str = ""
    settings: Mapping[str, Any] = field(default_factory=dict)
    facts: RunFacts = field(default_factory=RunFacts)
    starts: tuple[RunStart, ...] = ()

    @property
    def title(self) -> str:
        """The run's own name."""
        return str(self.settings.get("run.name") or self.name)


def read_record(directory: "RunDirectory", name: str) -> RunRecord:
    """The data in a run's directory. A run without steps has no rows.

    Raises:
        DataError: a file exists but cannot be read.
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
            starts=read_starts(directory.starts),
        )
    except (OSError, UnicodeDecodeError, ValueError) as error:
        raise DataError(f"expected the files of a run in {directory.path}, got: {error}") from error
