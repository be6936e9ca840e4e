"""Trajectories as rows and one of them whole, events, and the line at the top."""

import time
from collections.abc import Mapping
from typing import Any

from rich.cells import cell_len
from rich.text import Text

from deploy.top.drawing.blocks import ACCENT, BAD, GOOD, MUTED, SERIES, WARN, fitted, lines, nothing, plain, short
from schemas.messages.trajectories import Trajectory

LEVELS = {"info": MUTED, "good": GOOD, "warn": WARN, "bad": BAD}
HEALTHS = {"running": GOOD, "finished": ACCENT, "starting": MUTED, "stalled": BAD}
SHOWN_CHARACTERS = 20_000


def draw_head(data: Mapping[str, Any], width: int, _height: int = 1) -> Text:
    """Run, algorithm, health, step, reward, workers, and how long ago the last step was."""
    loop = data["loop"]
    reward, age = loop["metrics"].get("reward"), loop["step_age"]
    parts = [
        (f" {plain(loop['run'])}", "bold"),
        (f"● {loop['health']}", HEALTHS.get(loop["health"], WARN)),
        (f"step {loop['step']}", "bold"),
        ("" if reward is None else f"reward {short(reward)}", GOOD),
        (f"{loop['workers']} workers", ""),
        (f"weights {loop['announced']}", ""),
        ("" if age is None else f"last step {age:.0f} s ago", MUTED),
        (plain(loop["algorithm"]), MUTED),
    ]
    text = Text()
    for told, style in parts:
        if told and (not text or text.cell_len + 2 + cell_len(told) <= width):
            text.append("  " if text else "").append(told, style)
    return lines([text], width, 1)


def draw_events(data: Mapping[str, Any], width: int, height: int) -> Text:
    """Newest first, with their time."""
    events = data["events"]
    if not events:
        return nothing("nothing happened yet", width)
    rows = []
    for _, at, level, told, times in reversed(events[-height:] if height else []):
        row = Text.assemble((time.strftime("%H:%M:%S ", time.localtime(at)), MUTED), (plain(told), LEVELS[level]))
        rows.append(row.append(f"  ×{times}" if times > 1 else "", "bold"))
    return lines(rows, width, height)


COLUMNS = {"id": 22, "worker": 10, "bucket": 6, "tokens": 6, "predicted": 9, "reward": 6, "weights": 9, "fate": 17}
NUMBERS = ("bucket", "tokens", "predicted", "reward")
FEW, FEWER = ("id", "tokens", "reward", "fate"), ("id", "tokens", "reward")
ALL_FROM, FEW_FROM = 88, 46


def _columns(width: int) -> dict[str, int]:
    if width >= ALL_FROM:
        return COLUMNS
    if width >= FEW_FROM:
        return {name: COLUMNS[name] for name in FEW}
    return {name: COLUMNS[name] for name in FEWER} | {"id": max(4, min(COLUMNS["id"], width - 14))}


def row_of(row: Mapping[str, Any], width: int) -> Text:
    """A trajectory in a line: as many columns as fit, and how it begins."""
    versions, fate = row["versions"], row["fate"]
    held = versions[0] if len(versions) == 1 else f"{versions[0]}…{versions[-1].rpartition('-')[2]}"
    cells = {**row, "tokens": row["length"], "reward": short(row["reward"]), "weights": held}
    text = Text(no_wrap=True)
    for name, size in _columns(width).items():
        style = "" if name != "fate" else GOOD if fate.startswith("trained") else WARN if "skip" in fate else MUTED
        text.append(fitted(plain(str(cells[name])), size, right=name in NUMBERS), style).append(" ")
    if width - text.cell_len > 8:
        text.append(plain(row["text"][:120]), MUTED)
    text.rstrip()
    text.truncate(max(0, width), overflow="ellipsis")
    return text


def head_of_rows(width: int) -> Text:
    """Names of the columns."""
    names = (fitted(name, size, right=name in NUMBERS) for name, size in _columns(width).items())
    return lines([Text(" ".join(names).rstrip(), MUTED)], width, 1)


def draw_rows(data: Mapping[str, Any], width: int, height: int) -> Text:
    """The newest trajectories."""
    rows = data["trajectories"]
    if not rows:
        return nothing("no trajectory yet", width)
    return lines([head_of_rows(width), *(row_of(row, width) for row in rows[: height - 1])], width, height)


def preview(row: Mapping[str, Any]) -> Text:
    """What is known of a trajectory without reading its record again."""
    text = Text.assemble((plain(row["id"]), "bold"), ("  at ", MUTED), row["place"], ("  ", ""), (row["fate"], ACCENT))
    facts = f"{row['worker']}, bucket {row['bucket']}, {row['seconds']:.1f} s, ended by {row['finish']}"
    text.append(f"\n{plain(facts)}", MUTED)
    text.append(f"\n{row['length']} tokens, {row['predicted']} predicted; weights {' to '.join(row['versions'])}")
    text.append(f"\nreward {short(row['reward'])}\n\n", "bold").append(_paragraphs(row["text"]))
    return text.append("\n\nEnter reads the whole record: prompt, text, reward parts, versions", MUTED)


def whole(trajectory: Trajectory, place: str, fate: str, command: str) -> Text:
    """Prompt, completion, reward parts and the weights of every stretch of tokens."""
    count = len(trajectory.token_ids)
    text = Text.assemble((plain(trajectory.trajectory_id), "bold"), ("  at ", MUTED), place, "  ", (fate, ACCENT))
    text.append(
        f"\nsample {trajectory.sample_index + 1} of {trajectory.num_generations}, {plain(trajectory.worker_id)}, "
        f"bucket {trajectory.bucket}, ended by {trajectory.finish_reason.value}, "
        f"{trajectory.finished_at - trajectory.started_at:.1f} s",
        MUTED,
    )
    text.append(f"\n{count} tokens, {trajectory.predicted_length} predicted")
    _part(text, "rewards")
    for name, value in sorted(trajectory.rewards.items()):
        text.append(f"\n  {plain(name)} ").append(short(value), f"bold {GOOD if value else WARN}")
    for name, error in sorted(trajectory.reward_errors.items()):
        text.append(f"\n  {plain(name)} failed: {plain(str(error))}", BAD)
    _part(text, "weights by token")
    for number, span in enumerate(trajectory.version_spans):
        style = SERIES[number % len(SERIES)]
        text.append(f"\n  {span.version}".ljust(11), f"bold {style}").append(f" tokens {span.start} to {span.end - 1}")
    _part(text, "prompt")
    text.append("\n" + _paragraphs(trajectory.prompt_text))
    _part(text, "completion")
    text.append("\n" + _paragraphs(trajectory.completion_text))
    return text.append(f"\n\n{command}", MUTED)


def _part(text: Text, title: str) -> None:
    text.append(f"\n\n{title}", f"bold {ACCENT}")


def _paragraphs(text: str) -> str:
    cut = text[:SHOWN_CHARACTERS] + ("…" if len(text) > SHOWN_CHARACTERS else "")
    return "\n".join(plain(line) for line in cut.split("\n"))
