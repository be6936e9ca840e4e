"""``gathered.json``: what a run's topics, its evaluation and its machine told at its end. Small, whatever the run."""

from pathlib import Path

from pydantic import BaseModel, ConfigDict, JsonValue, ValidationError

from streamrl.schemas.errors import DataError


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
    draft = path.with_suffix(".draft")
    draft.write_text(facts.model_dump_json())
    draft.replace(path)
