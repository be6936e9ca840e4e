"""What a run leaves behind, by name, and what a run is called that was given none."""

import re
import stat
import time
from contextlib import suppress
from dataclasses import dataclass
from itertools import count
from pathlib import Path
from typing import TYPE_CHECKING

from streamrl.schemas.errors import SettingsError, UserError
from streamrl.schemas.files import write_whole
from streamrl.schemas.identifiers import INSTANCES

if TYPE_CHECKING:
    from streamrl.settings.tree import Settings
STAMP = "%Y%m%d-%H%M%S"
LONGEST_STEM = 40
"""Characters of the directory's name: with the time and a number behind it, a run's name has at most 64."""


def plain_run_name(directory: Path, longest: int = 64) -> str:
    """The directory's name as a run may be called."""
    plain = re.sub(r"[^a-z0-9._-]+", "-", directory.absolute().resolve().name.lower())
    return re.sub(r"\.{2,}", ".", plain).strip("._-")[:longest].rstrip("._-") or "my-run"


def named(settings: "Settings") -> "Settings":
    """The same settings; a run without a name gets one of the working directory's name and the time, which is free."""
    if settings.run.name:
        return settings
    stem = f"{plain_run_name(Path.cwd(), LONGEST_STEM)}-{time.strftime(STAMP)}"
    names = (stem if number == 1 else f"{stem}-{number}" for number in count(1))
    name = next(name for name in names if not (settings.run.directory / name).exists())
    return settings.model_copy(update={"run": settings.run.model_copy(update={"name": name})})


def require_name(settings: "Settings", role: str) -> None:
    """Make sure that a process by itself knows which run it belongs to.

    Raises:
        SettingsError: no name was given.
    """
    if not settings.run.name:
        raise SettingsError(
            f"expected run.name, got none: a {role} by itself joins a run by its name; name it with --run.name, or "
            f"give {settings.run.directory}/NAME/{CONFIG}"
        )


CONFIG = "config.resolved.toml"
EXPLAINED = """# Run {name}

Written by `streamrl run`. To go on, or for more steps: `streamrl run {path}/config.resolved.toml`.

| file | is |
|---|---|
| `report.html` | the run as a page, written at its end (`streamrl report {path}` writes it anew) |
| `summary.json` | its figures in one object; what each means stands in the manual under Concepts, The figures |
| `metrics.jsonl` | one line an optimizer step, under TRL's names |
| `config.resolved.toml` | every setting as it was; this file alone repeats the run |
| `checkpoints/step_N/` | models for `from_pretrained`, with `trainer_state/` to go on from (`streamrl checkpoints`) |
| `identity.json` | which run this is; without it the topics of this name are refused |
| `logs/` | one file a process; begin with `trainer.log`, then `worker-0.log` |
| `kafka/` | the own broker's data: every prompt, trajectory and skip (`streamrl audit {path}`) |
| `weights/` | the newest weight versions, for workers; of no use after the run |
| `records.sqlite`, `audit.sqlite`, `gathered.json` | made again from the topics where they are missing |
| `tracking/`, `traces/`, `cache/` | of experiment trackers, of tracing, and downloads; if there are any |

`streamrl runs ls` tells what runs take up, `streamrl runs rm {name} --keep-results` removes what is bulky.
"""
"""README.md of a run's directory."""


def instance_location(location: str, instance: str) -> str:
    """Where an instance's checkpoints go if the run's are at this place: beside them, never among them."""
    return f"{location.rstrip('/')}/{INSTANCES}/{instance}"


def bytes_on_disk(path: Path) -> int:
    """What a file, or all files below a folder, take up: of sparse ones, such as Kafka's indexes, what is there."""
    total = 0
    for place in path.rglob("*") if path.is_dir() else (path,):
        with suppress(OSError):  # removed meanwhile, by a run under way
            found = place.lstat()
            total += found.st_blocks * 512 if stat.S_ISREG(found.st_mode) else 0
    return total


@dataclass(frozen=True)
class RunDirectory:
    """``runs/<name>/``; the trainer writes ``metrics.jsonl``, ``checkpoints/`` and ``weights/`` itself."""

    path: Path

    def create(self) -> None:
        """Make the directory, with a page that says what is in it.

        Raises:
            UserError: it cannot be written.
        """
        try:
            self.logs.mkdir(parents=True, exist_ok=True)
            (self.path / "README.md").write_text(EXPLAINED.format(name=self.path.name, path=self.path))
        except OSError as error:
            raise UserError(f"expected a writable directory for the run, got {self.path}: {error.strerror}") from error

    def write_config(self, text: str) -> None:
        """Put the resolved settings in their place at once: a process that starts meanwhile reads the old or the new.

        Raises:
            UserError: the directory cannot be written.
        """
        try:
            write_whole(self.config, text)
        except OSError as error:
            raise UserError(f"expected a writable directory for the run, got {self.path}: {error.strerror}") from error

    @property
    def logs(self) -> Path:
        """One log file per process."""
        return self.path / "logs"

    @property
    def kafka(self) -> Path:
        """Data of an embedded broker, kept so that topics can be read afterwards; of an instance, that of its run."""
        is_instance = self.path.parent.name == INSTANCES
        return (self.path.parent.parent if is_instance else self.path) / "kafka"

    @property
    def config(self) -> Path:
        """The resolved settings; ``streamrl run`` on this file repeats the run."""
        return self.path / CONFIG

    @property
    def metrics(self) -> Path:
        """One JSON object per optimizer step."""
        return self.path / "metrics.jsonl"

    @property
    def checkpoints(self) -> Path:
        """``step_<N>/``, each a model directory with the trainer's state beside it."""
        return self.path / "checkpoints"

    @property
    def traces(self) -> Path:
        """Spans as OTLP-JSON, one file per process; only with ``telemetry.traces = "file"``."""
        return self.path / "traces"

    @property
    def record_index(self) -> Path:
        """Where each record stands, by name; made of the topics, and made again where it is missing."""
        return self.path / "records.sqlite"

    @property
    def summary(self) -> Path:
        """The run in one JSON object."""
        return self.path / "summary.json"

    @property
    def gathered(self) -> Path:
        """Facts about topics, evaluation and machine, gathered at the run's end; reports are made of it."""
        return self.path / "gathered.json"

    @property
    def report(self) -> Path:
        """The run as a page."""
        return self.path / "report.html"

    @property
    def gateway(self) -> Path:
        """API keys as hashes, completions that await feedback, and the secret that gateways and workers share."""
        return self.path / "gateway"

    @property
    def audit(self) -> Path:
        """What an audit beside the run knows, also of records that retention has deleted since."""
        return self.path / "audit.sqlite"
