"""Names the files in a run's directory, and picks a name for a run that was given none."""

import re
import shlex
import stat
import time
from contextlib import suppress
from dataclasses import dataclass
from itertools import count
from pathlib import Path
from typing import TYPE_CHECKING

from streamrl.schemas.errors import SettingsError, UserError
from streamrl.schemas.files import write_atomically
from streamrl.schemas.identifiers import INSTANCES

if TYPE_CHECKING:
    from streamrl.settings.tree import Settings
STAMP = "%Y%m%d-%H%M%S"
LONGEST_STEM = 40
"""Most characters taken from the directory's name, so that with time and number a run's name has at most 64."""


def plain_run_name(directory: Path, longest: int = 64) -> str:
    """The directory's name, converted to a valid run name."""
    plain = re.sub(r"[^a-z0-9._-]+", "-", directory.absolute().resolve().name.lower())
    return re.sub(r"\.{2,}", ".", plain).strip("._-")[:longest].rstrip("._-") or "my-run"


def named(settings: "Settings") -> "Settings":
    """The settings with a run name: the given one, else an unused one of the working directory's name and the time."""
    if settings.run.name:
        return settings
    stem = f"{plain_run_name(Path.cwd(), LONGEST_STEM)}-{time.strftime(STAMP)}"
    names = (stem if number == 1 else f"{stem}-{number}" for number in count(1))
    name = next(name for name in names if not (settings.run.directory / name).exists())
    return settings.model_copy(update={"run": settings.run.model_copy(update={"name": name})})


def require_name(settings: "Settings", role: str) -> None:
    """Check that a process which was started alone knows its run.

    Raises:
        SettingsError: no name was given.
    """
    if not settings.run.name:
        raise SettingsError(
            f"expected run.name, got none: a {role} that is started alone joins a run; name one on this machine with "
            "--run NAME, or give its configuration and --run.name NAME"
        )


CONFIG = "config.resolved.toml"
EXPLAINED = """# Run {name}

Written by `streamrl run`. `streamrl run {path}/config.resolved.toml` continues it; after its last step, add
`--training.max_steps N`.

| file | contents |
|---|---|
| `report.html` | the run as a page, written at its end (`streamrl report --run {path}` writes it again) |
| `summary.json` | the run's figures in one object; the manual's page Figures of a run explains each |
| `metrics.jsonl` | one line per optimizer step, under TRL's names |
| `config.resolved.toml` | all settings of the run; this file alone repeats it |
| `starts.jsonl` | one line per start: the step it continued from, and what had changed |
| `checkpoints/step_N/` | models for `from_pretrained`, with `trainer_state/` to resume from (`streamrl checkpoints`) |
| `identity.json` | the run's identity; without it the topics of this name are refused |
| `logs/` | one file per process; read `trainer.log` first, then `worker-0.log` |
| `kafka/` | data of the run's own broker: every prompt, trajectory and skip (`streamrl audit --run {path}`) |
| `weights/` | the newest weight versions, for workers; not needed after the run |
| `records.sqlite`, `audit.sqlite`, `gathered.json` | derived from the topics, and made again if they are missing |
| `tracking/`, `traces/`, `cache/` | files of experiment trackers, traces and downloads, if there are any |

`streamrl runs ls` lists the disk space of all runs. `streamrl runs rm {name} --keep-results` removes the large files.
"""
"""The README.md of a run's directory."""


def instance_location(location: str, instance: str) -> str:
    """Where an instance keeps its checkpoints, given the location of the run's; never mixed with those of the run."""
    return f"{location.rstrip('/')}/{INSTANCES}/{instance}"


def bytes_on_disk(path: Path) -> int:
    """Bytes on disk of a file or of all files below a folder; holes of sparse files (Kafka's indexes) do not count."""
    total = 0
    for place in path.rglob("*") if path.is_dir() else (path,):
        with suppress(OSError):  # a running run may have removed the file in the meantime
            found = place.lstat()
            total += found.st_blocks * 512 if stat.S_ISREG(found.st_mode) else 0
    return total


@dataclass(frozen=True)
class RunDirectory:
    """``runs/<name>/``. The trainer writes ``metrics.jsonl``, ``checkpoints/`` and ``weights/`` in it."""

    path: Path

    def create(self) -> None:
        """Create the directory with a README that lists its files.

        Raises:
            UserError: the directory cannot be written.
        """
        try:
            self.logs.mkdir(parents=True, exist_ok=True)
            (self.path / "README.md").write_text(EXPLAINED.format(name=self.path.name, path=self.path))
        except OSError as error:
            raise UserError(f"expected a writable directory for the run, got {self.path}: {error.strerror}") from error

    def write_config(self, text: str) -> None:
        """Write the resolved settings atomically: a process that starts in the meantime reads the old or the new ones.

        Raises:
            UserError: the directory cannot be written.
        """
        try:
            write_atomically(self.config, text)
        except OSError as error:
            raise UserError(f"expected a writable directory for the run, got {self.path}: {error.strerror}") from error

    @property
    def logs(self) -> Path:
        """One log file per process."""
        return self.path / "logs"

    @property
    def kafka(self) -> Path:
        """Data of the run's embedded broker, also for its instances; kept to read the topics after the run."""
        is_instance = self.path.parent.name == INSTANCES
        return (self.path.parent.parent if is_instance else self.path) / "kafka"

    @property
    def broker_command(self) -> str:
        """The command that starts the run's embedded broker again, to read the topics after the run."""
        return f"streamrl kafka up --data-dir {shlex.quote(str(self.kafka))}"

    @property
    def config(self) -> Path:
        """The resolved settings; ``streamrl run`` on this file repeats the run."""
        return self.path / CONFIG

    @property
    def starts(self) -> Path:
        """One JSON object per start: when, from which step, and what had changed since the start before."""
        return self.path / "starts.jsonl"

    @property
    def metrics(self) -> Path:
        """One JSON object per optimizer step."""
        return self.path / "metrics.jsonl"

    @property
    def checkpoints(self) -> Path:
        """Directories ``step_<N>/``, each with a model and the trainer's state."""
        return self.path / "checkpoints"

    @property
    def traces(self) -> Path:
        """Spans as OTLP-JSON, one file per process; only with ``telemetry.traces = "file"``."""
        return self.path / "traces"

    @property
    def record_index(self) -> Path:
        """An index from a record's name to its place on the topics; built from them, and rebuilt if it is missing."""
        return self.path / "records.sqlite"

    @property
    def summary(self) -> Path:
        """The run's figures as one JSON object."""
        return self.path / "summary.json"

    @property
    def gathered(self) -> Path:
        """Facts about topics, evaluation and machine, gathered at the run's end for its reports."""
        return self.path / "gathered.json"

    @property
    def report(self) -> Path:
        """The run's report as a page."""
        return self.path / "report.html"

    @property
    def gateway(self) -> Path:
        """Hashes of API keys, completions that wait for feedback, and the secret that gateways and workers share."""
        return self.path / "gateway"

    @property
    def audit(self) -> Path:
        """State of an audit during the run. It also covers records that retention has deleted since."""
        return self.path / "audit.sqlite"
