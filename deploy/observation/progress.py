"""Shows a running run: a live table on a terminal, one plain line per interval elsewhere."""

import asyncio
import sys
import time
from collections.abc import Mapping
from typing import Protocol

from rich.console import Group, RenderableType
from rich.live import Live
from rich.table import Table
from rich.text import Text

from deploy.observation.state import RunState

LINE_EVERY_S = 3.0
REFRESH_S = 0.5
LAG_PREFIX = "kafka/lag/bucket_"


class HasRestarts(Protocol):
    """Where restarts of processes are counted."""

    restarts: dict[str, int]


def lag_by_bucket(metrics: Mapping[str, float]) -> dict[int, int]:
    """Unread trajectories per length bucket."""
    found = {int(key.removeprefix(LAG_PREFIX)): int(v) for key, v in metrics.items() if key.startswith(LAG_PREFIX)}
    return dict(sorted(found.items()))


def _reward(metrics: Mapping[str, float]) -> str:
    return f"{metrics['reward']:.3f}" if "reward" in metrics else "-"


def plain_line(state: RunState, max_steps: int, now: float) -> str:
    """One line: step, reward, throughput, staleness, lag per bucket, version per worker."""
    metrics = state.steps[-1].metrics if state.steps else {}
    step = state.steps[-1].step if state.steps else 0
    workers = state.living_workers(now)
    lag = " ".join(f"b{bucket}:{count}" for bucket, count in lag_by_bucket(metrics).items()) or "-"
    held = " ".join(f"{beat.worker_id}@{beat.version}" for beat in workers) or ("gone" if state.steps else "none yet")
    return (
        f"step {step}/{max_steps}  reward {_reward(metrics)}  "
        f"{state.trajectories_per_s():.0f} traj/s  {sum(beat.tokens_per_s for beat in workers):.0f} tok/s  "
        f"staleness {metrics.get('off_policy/mean', 0.0):.1f} (max {metrics.get('off_policy/max', 0.0):.0f})  "
        f"lag {lag}  workers {held}"
    )


def live_view(state: RunState, max_steps: int, restarts: Mapping[str, int], now: float) -> RenderableType:
    """The table for a terminal."""
    metrics = state.steps[-1].metrics if state.steps else {}
    head = Text.assemble(
        (f"step {state.steps[-1].step if state.steps else 0}/{max_steps}  ", "bold"),
        (f"reward {_reward(metrics)}  ", "bold green"),
        f"{state.trajectories_per_s():.0f} trajectories/s  ",
        f"staleness {metrics.get('off_policy/mean', 0.0):.1f} mean, {metrics.get('off_policy/max', 0.0):.0f} max  ",
        "  ".join(f"{name} restarted ×{count}" for name, count in restarts.items()),
    )
    table = Table(expand=False)
    for column in ("worker", "state", "weights", "running", "waiting", "tokens/s"):
        table.add_column(column, justify="left" if column in ("worker", "state", "weights") else "right")
    for beat in state.living_workers(now):
        cells = (str(beat.version), str(beat.running), str(beat.waiting), f"{beat.tokens_per_s:.0f}")
        table.add_row(beat.worker_id, beat.state.value, *cells)
    lag = "  ".join(f"bucket {bucket}: {count}" for bucket, count in lag_by_bucket(metrics).items())
    return Group(head, table, Text(f"consumer lag  {lag or '-'}", style="dim"))


async def show_progress(state: RunState, max_steps: int, supervisor: HasRestarts, stop: asyncio.Event) -> None:
    """Show the state until stopped.

    Consumes: the state, which others update. Produces: text on standard output.
    Waits for: the next refresh. On failure: raises. On stop: shows the last state once more and returns.
    """
    if sys.stdout.isatty():
        with Live(auto_refresh=False) as live:
            while not await _stopped_within(stop, REFRESH_S):
                live.update(live_view(state, max_steps, supervisor.restarts, time.time()), refresh=True)
            live.update(live_view(state, max_steps, supervisor.restarts, time.time()), refresh=True)
        return
    while not await _stopped_within(stop, LINE_EVERY_S):
        print(plain_line(state, max_steps, time.time()), flush=True)
    print(plain_line(state, max_steps, time.time()), flush=True)


async def _stopped_within(stop: asyncio.Event, seconds: float) -> bool:
    try:
        await asyncio.wait_for(stop.wait(), seconds)
    except TimeoutError:
        return False
    return True
