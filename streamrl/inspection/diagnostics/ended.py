"""Shows a run that has ended and whose broker is gone, from the files in its directory."""

import json
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from streamrl.inspection.diagnostics.connect import BrokerStopped, RunConnection, TopicsMissing, connect
from streamrl.inspection.diagnostics.lag import buckets_text, figure_text
from streamrl.inspection.report.record import read_rows
from streamrl.inspection.report.summary import LEFT_OVER, summary_lines
from streamrl.inspection.source import PastRun, is_over, open_run
from streamrl.observability.run_state.state import by_reason, lag_by_bucket
from streamrl.schemas.errors import BusUnavailable
from streamrl.schemas.plain_text import plain_lines


@dataclass(frozen=True)
class EndedRun:
    """A run at its end. ``at``: of the last step, in seconds since the epoch; ``metrics``: of the last step."""

    past: PastRun
    summary: Mapping[str, Any]
    metrics: Mapping[str, float]
    step: int
    at: float

    @property
    def health(self) -> str:
        """Whether the run took its last step, or was stopped before."""
        is_finished = is_over(self.summary, self.step, self.past.settings.training.max_steps)
        return "finished" if is_finished else "stopped"

    @property
    def lag(self) -> dict[int, int]:
        """Trajectories that were sampled and not trained before the run ended, by length bucket."""
        found: Mapping[str, int] | None = self.summary.get("lag_by_bucket")
        if found is None:  # a summary of an older version
            return lag_by_bucket(self.metrics)
        return {int(bucket): count for bucket, count in found.items()}

    @property
    def skipped(self) -> dict[str, int]:
        """Skipped trajectories by reason."""
        found: dict[str, int] = self.summary.get("skipped") or by_reason(self.metrics)
        return {reason: count for reason, count in found.items() if count}

    @property
    def head(self) -> str:
        """A line that says that the run has ended, where, and where its figures are from."""
        end = f"{self.health} at step {self.step} of {self.past.settings.training.max_steps}"
        return f"run {self.past.name} has {end}; no broker has its topics, so the figures are from its files"

    @property
    def figures(self) -> dict[str, Any]:
        """The figures that have a meaning after the end, under the names of every display."""
        return {
            "health": self.health,
            "step": self.step,
            "max_steps": self.past.settings.training.max_steps,
            "reward": self.metrics.get("reward"),
            "staleness_mean": self.metrics.get("off_policy/mean"),
            "staleness_max": self.metrics.get("off_policy/max"),
            "trajectories_per_s": self.summary.get("trajectories_per_s"),
            "skipped": sum(self.skipped.values()),
            "skipped_by_reason": self.skipped,
            "lag": sum(self.lag.values()),
        }


def ended_run(past: PastRun) -> EndedRun | None:
    """The run at its end; None if its files do not show that it has ended, as after a crash."""
    try:
        summary = json.loads(past.directory.summary.read_text())
        rows = read_rows(past.directory.metrics)
    except (OSError, ValueError):
        return None
    # The summary of an earlier start does not cover the steps since.
    if not rows.steps or summary.get("steps") != rows.steps[-1]:
        return None
    return EndedRun(past, summary, rows.metrics[-1], rows.steps[-1], rows.began + rows.times[-1])


def show_run(
    run: Path | None,
    servers: str | None,
    live: Callable[[RunConnection], int],
    ended: Callable[[EndedRun], int],
) -> int:
    """Show a run with ``live`` from its broker, or with ``ended`` if it has ended and no broker answers.

    Raises:
        UserError: there is no such run, or no broker for a run that has not ended.
    """
    connection = None
    try:
        connection = connect(run, servers)
        return live(connection)
    except (BrokerStopped, TopicsMissing, BusUnavailable) as error:
        past = error.past if isinstance(error, BrokerStopped) else _past_of(run, connection)
        found = None if past is None else ended_run(past)
        # A run that was stopped at another broker may have been started again, elsewhere.
        if found is None or (found.health != "finished" and not isinstance(error, BrokerStopped)):
            raise
        return ended(found)


def _past_of(run: Path | None, connection: RunConnection | None) -> PastRun | None:
    """The run's files, if they are on this machine."""
    if run is None or connection is None or connection.directory is None:
        return None
    return open_run(run)


def show_ended_status(ended: EndedRun, *, as_json: bool) -> int:
    """Print the figures that the run wrote at its end, and return the exit code."""
    if as_json:
        print(json.dumps({"run": ended.past.name, **ended.figures, "summary": ended.summary}))
        return 0
    print(plain_lines(_status_lines(ended)))
    return 0


def _status_lines(ended: EndedRun) -> Iterator[str]:
    yield ended.head
    yield from (line for line in summary_lines(dict(ended.summary)) if line)
    if "lag_by_bucket" not in ended.summary:
        yield _lag_line(ended)
    yield f"figures: {ended.past.directory.summary}"
    yield f"to look at its records: {ended.past.directory.broker_command}"


def show_ended_lag(ended: EndedRun, *, as_json: bool) -> int:
    """Print the trajectories that were left over, and return the exit code. No consumer group is left to look at."""
    if as_json:
        found = {"run": ended.past.name, "health": ended.health, "lag": sum(ended.lag.values())}
        print(json.dumps(found | {"lag_by_bucket": ended.lag, "groups": [], "grading": []}))
    else:
        print(plain_lines([ended.head, _lag_line(ended)]))
    return 0


def _lag_line(ended: EndedRun) -> str:
    return f"lag {sum(ended.lag.values()):,} {LEFT_OVER}{buckets_text(ended.lag)}"


def show_ended_top(ended: EndedRun, *, as_json: bool) -> int:
    """Print one line on the run's end, and return the exit code."""
    lag = sorted(ended.lag.items())
    if as_json:
        sections = {"loop": ended.figures, "lag": {"buckets": [b for b, _ in lag], "lag": [n for _, n in lag]}}
        print(json.dumps({"at": round(ended.at, 3), "run": ended.past.name, **sections, "events": []}))
        return 0
    figures = ended.figures
    skips = " ".join(f"{reason}:{count}" for reason, count in ended.skipped.items())
    parts = (
        f"{ended.past.name} {ended.health}",
        f"step {ended.step}/{figures['max_steps']}",
        f"reward {figure_text(figures['reward'])}",
        f"{figure_text(figures['trajectories_per_s'])} traj/s",
        f"staleness {figure_text(figures['staleness_mean'])} (max {figure_text(figures['staleness_max'])})",
        f"lag {' '.join(f'b{bucket}:{count}' for bucket, count in lag) or '-'}",
        *([f"skipped {skips}"] if skips else []),
    )
    print(plain_lines([ended.head, "  ".join(parts)]))
    return 0
