"""``gathered.json``: what a run's topics, its evaluation and its machine told at its end. Small, whatever the run."""

import os
import platform
import shutil
import subprocess
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path

from pydantic import BaseModel, ConfigDict, JsonValue, ValidationError

from inspection.host import device_name
from schemas.errors import DataError

# The machine and the code of a run in words: versions, hardware, the commit. Loads no heavy library.

LIBRARIES = ("streamrl", "torch", "transformers", "vllm", "aiokafka", "numpy", "datasets")
GIT_S = 5.0


def environment() -> dict[str, str]:
    """By name, in the order in which it is shown; what cannot be told is left out."""
    cpu, device = device_name("cpu"), device_name("auto")
    found = {
        "CPU": cpu,
        "GPU": "none" if device == cpu else device,
        "memory": _memory(),
        "system": f"{platform.system()} {platform.release()}, {platform.machine()}",
        "Python": platform.python_version(),
        **{name: text for name in LIBRARIES if (text := _version(name))},
        "StreamRL's commit": commit_of(Path(__file__).parent),
        "commit of the working directory": commit_of(Path.cwd()),
    }
    if found["commit of the working directory"] == found["StreamRL's commit"]:
        del found["commit of the working directory"]
    return {name: text for name, text in found.items() if text}


def commit_of(folder: Path) -> str:
    """The commit that is checked out there, and whether files differ from it; empty if it is in no repository."""
    git = shutil.which("git")
    if git is None:
        return ""
    try:
        head, changed = (
            subprocess.run(
                [git, "-C", str(folder), *command], capture_output=True, text=True, timeout=GIT_S, check=True
            ).stdout.strip()
            for command in (("rev-parse", "--short=12", "HEAD"), ("status", "--porcelain", "--untracked-files=no"))
        )
    except (OSError, subprocess.SubprocessError):
        return ""
    return f"{head}, with changes" if changed else head


def _version(name: str) -> str:
    try:
        return version(name)
    except PackageNotFoundError:
        return ""


def _memory() -> str:
    try:
        size = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    except (OSError, ValueError):
        return ""
    return f"{size / (1 << 30):.0f} GiB"


class _Part(BaseModel):
    model_config = ConfigDict(frozen=True, extra="ignore")


class Activity(_Part):
    """A worker: stretches in which it generated, and when it adopted which weights; seconds since the epoch."""

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


class Sample(_Part):
    """A trajectory as people read it; texts cut to a few thousand characters."""

    trajectory_id: str
    prompt: str
    completion: str
    rewards: dict[str, float | None]
    tokens: int
    predicted: int
    versions: tuple[str, ...]
    worker: str


class TopicFacts(_Part):
    """Of the ``held`` trajectories on the topic, ``read`` were read, the newest. ``staleness``: trained ones by age."""

    held: int
    read: int
    workers: dict[str, Activity] = {}
    lengths: LengthFacts | None = None
    staleness: dict[int, int] = {}
    first: tuple[Sample, ...] = ()
    last: tuple[Sample, ...] = ()


class Gathered(_Part):
    """``evaluated``: held-out samples by moment (before, after). ``topics`` None: they were not read."""

    environment: dict[str, str] = {}
    evaluated: dict[str, tuple[dict[str, JsonValue], ...]] = {}
    topics: TopicFacts | None = None


def read_gathered(path: Path) -> Gathered:
    """What was kept; nothing if the run kept none.

    Raises:
        DataError: the file is there and is none of ours.
    """
    try:
        return Gathered.model_validate_json(path.read_bytes())
    except FileNotFoundError:
        return Gathered()
    except (OSError, ValidationError) as error:
        first = " ".join(str(error).split())[:200]
        raise DataError(
            f"expected what a run gathered in {path}, got {first}; remove it and give --from-topics"
        ) from error


def write_gathered(path: Path, gathered: Gathered) -> None:
    """Keep it, whole or not at all."""
    draft = path.with_suffix(".draft")
    draft.write_text(gathered.model_dump_json())
    draft.replace(path)
