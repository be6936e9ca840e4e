"""`streamrl show`: prints one trajectory or one group.

A trajectory is shown with its tokens and log-probs by weight version, its rewards and its history; a group with its
samples.
"""

import asyncio
import datetime
import sys
import tempfile
from collections.abc import Callable
from contextlib import closing
from pathlib import Path

from rich.console import Console
from rich.text import Text

from streamrl.bus.history import History
from streamrl.inspection.opening import index_of
from streamrl.inspection.replay.history import GroupHistory, HistoryReader, TrajectoryHistory
from streamrl.inspection.replay.view import as_json, columns, number
from streamrl.inspection.source import PastRun, history_of, open_run
from streamrl.observability.record_index.following import IndexFollower
from streamrl.observability.record_index.store import RecordIndex
from streamrl.schemas.identifiers import PolicyVersion
from streamrl.schemas.plain_text import plain_lines, plain_text
from streamrl.schemas.trajectories import Trajectory

STYLES = ("cyan", "yellow", "green", "magenta", "blue", "red")
UNTRAINED = "dim"
"""Style of tokens that the loss mask leaves out. They are also in brackets, because colours may be off."""
PROGRESS_FROM = 20_000
"""Fewest records to index for which progress is shown: they take about a second."""
Piece = Callable[[int], str]


def show(name: str, run_path: Path, export: Path | None, *, json: bool) -> None:
    """Print a trajectory's history, or the state of a group's samples.

    Raises:
        UserError: there is no such trajectory or group, or no such run.
    """
    run = open_run(run_path)
    with (
        tempfile.TemporaryDirectory(prefix="streamrl-show-") as scratch,
        history_of(run, export, Path(scratch), lambda line: print(line, file=sys.stderr)) as topics,
        # An export gets an index in memory: a run may have several exports, and its own index belongs to its broker.
        closing(RecordIndex(None) if export is not None else index_of(run)) as index,
    ):
        history = asyncio.run(_look_up(topics, index, run, name))
    if json:
        print(as_json(history))
    elif isinstance(history, GroupHistory):
        print("\n".join(group_lines(history)))
    else:
        Console(soft_wrap=True, highlight=False).print(history_text(history, pieces_of(run.settings.model.path)))


async def _look_up(topics: History, index: RecordIndex, run: PastRun, name: str) -> TrajectoryHistory | GroupHistory:
    follower = IndexFollower(topics, run.name, index, progress=_print_progress)
    try:
        return await HistoryReader(follower, run.settings.algorithm.name).look_up(name)
    finally:
        await topics.close()


def _print_progress(done: int, total: int) -> None:
    """Show progress on one line, if there are enough records."""
    if total >= PROGRESS_FROM:
        end = "\n" if done == total else ""
        print(f"\rindexing the run's records: {done:,} of {total:,}", end=end, file=sys.stderr, flush=True)


def group_lines(group: GroupHistory) -> list[str]:
    """Lines with one row per sample, and the samples that are still missing."""
    rows = [
        (
            sample.trajectory_id,
            f"{sample.record.partition}@{sample.record.offset}",
            "-" if (found := sample.trajectory) is None else str(len(found.token_ids)),
            "-" if found is None else _rewards_text(found),
            "-" if found is None else found.worker_id,
            sample.record.fate if found is not None else f"{sample.record.fate}; does not decode",
        )
        for sample in group.samples
    ]
    first = next((sample.trajectory for sample in group.samples if sample.trajectory is not None), None)
    asked = f" of {first.num_generations}" if first is not None else ""
    lines = [f"{group.group_id}: {len({row[0] for row in rows})}{asked} samples"]
    if first is not None:
        lines += ["prompt:", *(f"  {line}" for line in first.prompt_text.splitlines())]
    lines += columns(("sample", "record", "tokens", "reward", "worker", "fate"), rows, left=6)
    if group.unread:
        lines.append(f"and {group.unread:,} more records")
    if group.awaited:
        workers = ", ".join(dict.fromkeys(order.worker_id for order in group.orders))
        lines.append(f"ordered from {workers}, not on the topic yet: {', '.join(group.awaited)}")
    return lines


def _rewards_text(trajectory: Trajectory) -> str:
    return ", ".join(f"{name} {'-' if value is None else number(value)}" for name, value in trajectory.rewards.items())


def history_text(history: TrajectoryHistory, piece: Piece) -> Text:
    """A trajectory in full. ``piece`` gives a token's text. The versions of tokens are also shown without colours."""
    trajectory = history.trajectory
    styles = _styles(trajectory)
    text = Text(plain_lines(_head(trajectory)) + "\n\n")
    text.append(f"tokens, with log-probs at temperature {number(trajectory.temperature)}; versions: ")
    for version, style in styles.items():
        text.append(f"{plain_text(trajectory.named(version))} ", style)
    if not trajectory.loss_mask.all():
        text.append("(not trained)", UNTRAINED)
    text.append("\n")
    for line in _token_lines(trajectory, piece, styles):
        text.append_text(line).append("\n")
    worth = [*_turns(trajectory), *_rewards(trajectory), *_advantage(history)]
    return text.append("\n" + plain_lines([*worth, "", *_records(history), "", *_events(history)]))


def pieces_of(model_path: str) -> Piece:
    """Token texts from a model's tokenizer; the ids themselves if no tokenizer can be loaded."""
    from streamrl.producers.generation.tokenizer import ModelTokenizer
    from streamrl.schemas.errors import ModelError

    try:
        tokenizer = ModelTokenizer(model_path)
    except ModelError:
        return lambda token_id: f"#{token_id}"
    return lambda token_id: tokenizer.decode_with_special([token_id]) or f"#{token_id}"


def _styles(trajectory: Trajectory) -> dict[PolicyVersion, str]:
    versions = dict.fromkeys(span.version for span in trajectory.version_spans)
    return {version: STYLES[index % len(STYLES)] for index, version in enumerate(versions)}


def _head(trajectory: Trajectory) -> list[str]:
    return [
        f"{trajectory.trajectory_id}: sample {trajectory.sample_index + 1} of {trajectory.num_generations}, "
        f"data set {trajectory.dataset}, {trajectory.finish_reason.value}",
        "prompt:",
        *(f"  {line}" for line in trajectory.prompt_text.splitlines()),
        "completion:",
        *(f"  {line}" for line in trajectory.completion_text.splitlines()),
    ]


def _token_lines(trajectory: Trajectory, piece: Piece, styles: dict[PolicyVersion, str]) -> list[Text]:
    """One line for each version span."""
    lines = []
    for span in trajectory.version_spans:
        style = styles[span.version]
        line = Text("  ").append(f"[{plain_text(trajectory.named(span.version))}]", f"bold {style}")
        for index in range(span.start, span.end):
            trained = bool(trajectory.loss_mask[index])
            # The quotes of ``repr`` show where a token starts and ends, and it escapes unprintable characters.
            shown = f"{piece(int(trajectory.token_ids[index]))!r} {trajectory.logprobs[index]:.2f}"
            line.append("  ").append(shown if trained else f"({shown})", style if trained else f"{UNTRAINED} {style}")
        lines.append(line)
    return lines


def _turns(trajectory: Trajectory) -> list[str]:
    """Lines with the tokens and rewards of each call of a session; empty for a single completion."""
    if not trajectory.turns:
        return []
    lines = [f"turns of session {trajectory.session}:"]
    for count, turn in enumerate(trajectory.turns, 1):
        given = ", ".join(f"{name} {number(value)}" for name, value in sorted(turn.rewards.items()))
        lines.append(f"  {count}: tokens [{turn.start}, {turn.end}){', ' * bool(given)}{given}")
    return [*lines, ""]


def _advantage(history: TrajectoryHistory) -> list[str]:
    return [] if history.advantage is None else [f"advantage: {number(history.advantage)}"]


def _rewards(trajectory: Trajectory) -> list[str]:
    lines = ["rewards:"]
    lines += [f"  {name}: {number(value)}" for name, value in sorted(trajectory.rewards.items())]
    return lines + [f"  {name} failed: {error}" for name, error in sorted(trajectory.reward_errors.items())]


def _records(history: TrajectoryHistory) -> list[str]:
    return ["records:", *(f"  {seen.partition}@{seen.offset}: {seen.fate}" for seen in history.records)]


def _events(history: TrajectoryHistory) -> list[str]:
    rows = [
        (_clock(event.at), "" if event.since is None else f"+{event.since:.3f} s", event.what, event.detail)
        for event in history.events
    ]
    padded = columns(("time (UTC)", "after", "", ""), rows, left=4)
    return ["history:", *(f"  {line}" for line in padded)]


def _clock(at: float) -> str:
    return datetime.datetime.fromtimestamp(at, datetime.UTC).strftime("%Y-%m-%d %H:%M:%S.%f")[:-3]
