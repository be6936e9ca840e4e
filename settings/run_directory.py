"""What a run leaves behind, by name."""

from dataclasses import dataclass
from pathlib import Path

from schemas.errors import UserError


@dataclass(frozen=True)
class RunDirectory:
    """``runs/<name>/``; the trainer writes ``metrics.jsonl``, ``checkpoints/`` and ``weights/`` itself."""

    path: Path

    def create(self) -> None:
        """Make the directory.

        Raises:
            UserError: it cannot be written.
        """
        try:
            self.logs.mkdir(parents=True, exist_ok=True)
        except OSError as error:
            raise UserError(f"expected a writable directory for the run, got {self.path}: {error.strerror}") from error

    @property
    def logs(self) -> Path:
        """One log file per process."""
        return self.path / "logs"

    @property
    def kafka(self) -> Path:
        """Data of an embedded broker, kept so that the run's topics can be read afterwards."""
        return self.path / "kafka"

    @property
    def config(self) -> Path:
        """The resolved settings; ``streamrl run`` on this file repeats the run."""
        return self.path / "config.resolved.toml"

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
    def audit(self) -> Path:
        """What an audit beside the run knows, also of records that retention has deleted since."""
        return self.path / "audit.sqlite"

    def newest_checkpoint(self) -> Path | None:
        """The checkpoint of the highest step."""
        found = [path for path in self.checkpoints.glob("step_*") if path.name.removeprefix("step_").isdigit()]
        # As a number: by name, step_900 comes after step_1000.
        return max(found, key=lambda path: int(path.name.removeprefix("step_")), default=None)
