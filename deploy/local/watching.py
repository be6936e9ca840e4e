"""Shows the progress of `streamrl run`: the live view on a terminal, lines elsewhere.

The live view is a separate process, so that neither its load nor a crash affects the run. While it has the terminal,
the run's own output goes to ``logs/run.log``.
"""

import asyncio
import os
import signal
import sys
import time
from collections.abc import Awaitable, Callable, Iterator, Mapping
from contextlib import contextmanager
from functools import partial
from pathlib import Path

from rich.console import Group, RenderableType
from rich.live import Live
from rich.table import Table
from rich.text import Text

from streamrl.bus.embedded.process import die_with_parent
from streamrl.bus.waiting import end_tasks, wait_for_event
from streamrl.observability.run_state.figures import Value, live_figures, span_text
from streamrl.observability.run_state.state import RunState
from streamrl.schemas.import_path import module_command
from streamrl.schemas.plain_text import plain_text
from streamrl.settings.loading import without_settings
from streamrl.settings.run_directory import RunDirectory

LEAVING_S = 5.0
"""Seconds that the view has to restore the terminal after SIGTERM, before it is killed."""
LINE_EVERY_S = 3.0
LINE = 120
"""Most characters of a line: as wide as terminals and viewers of logs usually are."""
REFRESH_S = 0.5
LOG = "run.log"
INTERRUPTED = 130
"""Exit code of a view that was ended by Ctrl-C: 128 + SIGINT."""

Progress = Callable[[asyncio.Event], Awaitable[None]]


async def watch(
    directory: RunDirectory, address: str, secrets: Mapping[str, str], progress: Progress, stop: asyncio.Event
) -> None:
    """Show the live view if there is a terminal; after the user leaves it, or without a terminal, the run's progress.

    ``secrets``: environment variables with the secrets, which the resolved file masks.

    Consumes: nothing; the view reads the run's topics. Produces: text on the terminal.
    Waits for: the end of the view or of the run. On failure: if the view fails, the progress is shown instead.
    On stop: ends the view. Ctrl-C in the view stops the run.
    """
    if is_screen():
        command = module_command("streamrl", "top", "--run", str(directory.path))
        # In this process's session, unlike the roles, because the view needs the terminal.
        view = await asyncio.create_subprocess_exec(
            *command,
            f"--bootstrap-servers={address}",
            env=without_settings(os.environ) | dict(secrets),
            preexec_fn=partial(die_with_parent, signal.SIGTERM),  # SIGTERM lets the view restore the terminal
        )
        with output_to_file(directory.logs / LOG):
            await _wait_for_view(view, stop)
        # In raw mode the terminal passes Ctrl-C as a key to the view only, so the run gets its signal from here.
        if view.returncode == INTERRUPTED:
            signal.raise_signal(signal.SIGINT)
    await progress(stop)


def is_screen() -> bool:
    """Whether this is a terminal that can show more than lines."""
    return sys.stdout.isatty() and sys.stdin.isatty() and os.environ.get("TERM", "dumb") != "dumb"


@contextmanager
def output_to_file(path: Path) -> Iterator[None]:
    """Append this process's standard output and error to a file during the block."""
    # Buffered text belongs to the terminal; if it were written later, it would go to the file.
    _flush()
    # Descriptors are replaced and not ``sys.stdout``, because libraries and logging keep a reference to the stream.
    kept = os.dup(1), os.dup(2)
    with path.open("ab") as file:
        os.dup2(file.fileno(), 1)
        os.dup2(file.fileno(), 2)
    try:
        yield
    finally:
        _flush()  # buffered text of the block belongs to the file
        for number, original in enumerate(kept, 1):
            os.dup2(original, number)
            os.close(original)


def _flush() -> None:
    sys.stdout.flush()
    sys.stderr.flush()


async def _wait_for_view(view: asyncio.subprocess.Process, stop: asyncio.Event) -> None:
    ends = {asyncio.create_task(view.wait()), asyncio.create_task(stop.wait())}
    try:
        await asyncio.wait(ends, return_when=asyncio.FIRST_COMPLETED)
        # If the run ended first, the view is asked to exit, because only the view can restore the terminal.
        if view.returncode is None:
            view.terminate()
            await asyncio.wait_for(view.wait(), LEAVING_S)
    except TimeoutError:
        view.kill()
    finally:
        await end_tasks(ends)


def _text(value: Value, digits: int) -> str:
    return "-" if value is None else f"{value:.{digits}f}"


def _learning(state: RunState, figures: Mapping[str, Value], max_steps: int) -> list[str]:
    """Step, and how well the policy does: reward and loss of that step, and the newest result on held-out prompts."""
    parts = [f"step {figures['step']}/{max_steps}", f"reward {_text(figures['reward'], 3)}"]
    if (loss := state.metrics.get("loss")) is not None:
        parts.append(f"loss {loss:.3g}")
    if (passed := figures["pass_at_1"]) is not None:
        parts.append(f"pass@1 {_text(passed, 3)} (step {state.learning.evaluations.rows[-1][0].number})")
    return parts


def plain_line(state: RunState, max_steps: int, now: float, since: float = 0.0) -> str:
    """A line of at most ``LINE`` characters: step, reward, loss, held-out result, rate and, as far as there is room,
    time left, staleness, lag and workers. A warning has a line of its own.

    ``since``: time of the run's start. Until its trainer reports, the topics tell only of earlier starts.
    """
    if (before := _resuming(state, since)) is not None:
        return before
    if (starting := _starting(state, max_steps, now)) is not None:
        return "\n".join([starting, *_warning(state, now)])
    figures = live_figures(state, now)
    left = figures["time_left_s"]
    parts = [
        *_learning(state, figures, max_steps),
        f"{_text(figures['trajectories_per_s'], 0)} traj/s",
        *([f"{span_text(left)} left"] if left else []),
        f"staleness {_text(figures['staleness_mean'], 1)}",
        f"lag {figures['lag']}",
        f"{figures['workers']} {'worker' if figures['workers'] == 1 else 'workers'}",
    ]
    while len("  ".join(parts)) > LINE:
        parts.pop()
    return "\n".join([plain_text("  ".join(parts)), *_warning(state, now)])


def _resuming(state: RunState, since: float) -> str | None:
    """What to show while the topics tell only of a start before ``since``."""
    if state.progress.step_at is None or state.progress.step_at >= since:
        return None
    return f"resuming: the last start ended after step {state.progress.step}; its trainer restores a checkpoint"


def _starting(state: RunState, max_steps: int, now: float) -> str | None:
    """What to show before the first step, which has no figures yet."""
    if state.progress.finished or (waits_for := state.before_first_step(now)) is None:
        return None
    return plain_text(f"step {state.progress.step}/{max_steps}  starting: {waits_for}")


def _warning(state: RunState, now: float) -> list[str]:
    """The line of the warning, if there is one."""
    warning = state.warning(now)
    return [] if warning is None else [plain_text(f"warning: {warning}")]


def live_view(
    state: RunState, max_steps: int, restarts: Mapping[str, int], now: float, since: float = 0.0
) -> RenderableType:
    """The progress as a table for a terminal. ``since``: see ``plain_line``."""
    if (before := _resuming(state, since)) is not None:
        return Text(before, style="bold")
    figures = live_figures(state, now)
    step, *learned = _learning(state, figures, max_steps)
    left = figures["time_left_s"]
    head = Text.assemble(
        (f"{step}  ", "bold"),
        ("  ".join(learned) + "  ", "bold green"),
        f"{_text(figures['trajectories_per_s'], 0)} traj/s  ",
        f"{span_text(left)} left  " if left else "",
        f"staleness {_text(figures['staleness_mean'], 1)}, max {_text(figures['staleness_max'], 0)}  ",
        "  ".join(f"{name} restarted ×{count}" for name, count in restarts.items()),
    )
    table = Table(expand=False)
    for column in ("worker", "state", "weights", "running", "waiting", "tokens/s"):
        table.add_column(column, justify="left" if column in ("worker", "state", "weights") else "right")
    for beat in state.living_workers(now):
        cells = (
            beat.weights,
            str(beat.running),
            str(beat.waiting),
            f"{beat.tokens_per_s:.0f}",
        )
        table.add_row(Text(plain_text(beat.worker_id)), beat.state.value, *cells)
    lag = "  ".join(f"bucket {bucket}: {count}" for bucket, count in state.lag.items())
    notes = [Text(line, style="bold red") for line in _warning(state, now)]
    if (starting := _starting(state, max_steps, now)) is not None:
        notes.append(Text(starting, style="bold"))
    return Group(head, table, Text(f"lag  {lag or '-'}", style="dim"), *notes)


async def show_progress(
    state: RunState, max_steps: int, restarts: Mapping[str, int], since: float, stop: asyncio.Event
) -> None:
    """Show the state and the numbers of restarts until stopped. ``since``: see ``plain_line``.

    Consumes: the state, which others update. Produces: text on standard output.
    Waits for: the next refresh. On failure: raises. On stop: shows the last state and returns.
    """
    if sys.stdout.isatty():
        # Only this task draws: rich's automatic refresh is a thread, and the state belongs to the event loop.
        with Live(auto_refresh=False) as live:
            while not await wait_for_event(stop, REFRESH_S):
                live.update(live_view(state, max_steps, restarts, time.time(), since), refresh=True)
            # A last refresh, so that the terminal keeps the last state.
            live.update(live_view(state, max_steps, restarts, time.time()), refresh=True)
        return
    while not await wait_for_event(stop, LINE_EVERY_S):
        print(plain_line(state, max_steps, time.time(), since), flush=True)
    print(plain_line(state, max_steps, time.time()), flush=True)
