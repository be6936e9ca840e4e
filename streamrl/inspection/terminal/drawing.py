"""Draws the parts of the screen as text: bars and curves in block characters, numbers, events and trajectories.

Curves are drawn here, in eighths of a cell, because Textual's Sparkline shows neither bounds nor gaps.

Invariant every_line_fits_its_width: no line is wider than the given number of terminal cells, for any text.
"""

import math
import re
import time
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from rich.cells import cell_len, set_cell_size
from rich.text import Text

from streamrl.schemas.plain_text import plain_text
from streamrl.schemas.trajectories import Trajectory

Draw = Callable[[Mapping[str, Any], int, int], Text]
"""Takes sections of a run's snapshot, a width and a height in cells, and returns a text that fits them."""
MARGIN = 6
"""Cells to the left of a curve, for its bounds."""
EIGHTHS = " ▏▎▍▌▋▊▉"
BAR_LEVELS = " ▁▂▃▄▅▆▇█"

ACCENT, MUTED, GRID = "#4fd1bd", "#9ba5b3", "#3a434f"
GOOD, WARN, BAD = "#6ed391", "#f0b65c", "#ff8d84"
KINDS = {
    "generate": "#2bb7a3",
    "train": "#9a85f2",
    "optimizer": "#e37acb",
    "publish": "#f0ab45",
    "checkpoint": "#6fa8f5",
    "wait": GRID,
}
SERIES = ("#4fd1bd", "#b3a2ff", "#f0ab45", "#6fa8f5", "#e37acb", "#b9cf5f")

EVENT_LEVELS = {"info": MUTED, "good": GOOD, "warn": WARN, "bad": BAD}
HEALTHS = {"running": GOOD, "finished": ACCENT, "starting": MUTED, "stalled": BAD}
SHOWN_CHARACTERS = 20_000
"""Characters shown of a text. More would make the screen slow to scroll."""
Column = float | None
_RUNS = re.compile("█+|[^█]+")


def fitted(text: str, width: int, *, right: bool = False) -> str:
    """The text at exactly ``width`` cells: padded, or cut with an ellipsis."""
    missing = width - cell_len(text)
    if missing < 0:
        return set_cell_size(text, width - 1) + "…" if width > 0 else ""
    return " " * missing + text if right else text + " " * missing


def short(value: float | None) -> str:
    """A number in at most six characters: 0.123, 12.3, 1234, 12k, 3.4M; a dash for None."""
    if value is None or not math.isfinite(value):
        return "–"
    size = abs(value)
    for factor, letter in ((1e9, "G"), (1e6, "M"), (1e3, "k")):
        # Four digits are kept. From 9999.5 on, rounding would make five.
        if size >= max(factor, 9999.5):
            scaled = value / factor
            return f"{scaled:.1f}{letter}" if abs(scaled) < 9.95 else f"{scaled:.0f}{letter}"
    if value == round(value) or size >= 99.95:
        return f"{value:.0f}"
    # The bounds are a little below the round numbers, since rounding could add a digit.
    digits = 1 if size >= 9.995 else 2 if size >= 0.995 else 3
    return f"{value:.{digits}f}" if size >= 0.0005 else f"{value:.0e}"


def bar(share: float, width: int) -> str:
    """A horizontal bar for a share from 0 to 1, padded with blanks to ``width``. Any share above 0 is visible."""
    eighths = round(min(1.0, max(0.0, share)) * width * 8)
    # A very small share must differ from 0.
    eighths = max(eighths, 1) if share > 0 and width else eighths
    whole, rest = divmod(eighths, 8)
    return ("█" * whole + (EIGHTHS[rest] if rest else "")).ljust(width)


def resampled(values: Sequence[Column], width: int) -> list[Column]:
    """One value per column: means of neighbours, or repeated values if there are too few."""
    count = len(values)
    if not count or width <= 0:
        return []
    columns: list[Column] = []
    for column in range(width):
        first = column * count // width
        last = max(first + 1, (column + 1) * count // width)
        # Missing values do not count in the mean.
        known = [value for value in values[first:last] if value is not None]
        columns.append(sum(known) / len(known) if known else None)
    return columns


def columns_of(values: Sequence[Column], height: int, low: float, high: float) -> list[str]:
    """Rows from the top down. Each value is a column, scaled so that ``high`` fills ``height`` rows. Gaps are blank."""
    span = high - low
    levels = []
    for value in values:
        # A metric that never changed is drawn at half height, because it is at neither bound.
        share = 0.5 if span <= 0 else 0.0 if value is None else (value - low) / span
        # Level 0 is a gap. Values have levels 1 to 8 * height, so the lowest one is visible.
        levels.append(0 if value is None else 1 + round(min(1.0, max(0.0, share)) * (height * 8 - 1)))
    return [
        "".join(BAR_LEVELS[min(8, max(0, level - 8 * row))] for level in levels) for row in range(height - 1, -1, -1)
    ]


def coloured(drawn: str, style: str) -> Text:
    """Blocks in a colour. Full blocks also get it as background, because some terminals put space between lines."""
    text = Text(no_wrap=True)
    # By runs of full and of partial blocks, for as few spans as possible: Rich styles each span.
    for run in _RUNS.findall(drawn):
        text.append(run, f"{style} on {style}" if run[0] == "█" else style)
    return text


def first_that_fits(candidates: Sequence[str], width: int) -> str:
    """The first of some texts, given longest first, that fits the width; else the last one, cut."""
    return next((text for text in candidates if cell_len(text) <= width), fitted(candidates[-1], width).rstrip())


def lines(rows: Sequence[Text], width: int, height: int) -> Text:
    """One text of at most ``height`` rows, each cut to the width."""
    kept = list(rows[: max(0, height)])
    for row in kept:
        row.no_wrap = True
        row.truncate(max(0, width), overflow="ellipsis" if width > 0 else "crop")
    return Text("\n", no_wrap=True).join(kept)


def placeholder(why: str, width: int) -> Text:
    """The text that is shown if there is nothing to draw."""
    return lines([Text(why, MUTED)], width, 1)


def curve(name: str, style: str = ACCENT) -> Draw:
    """A function that draws this metric over the optimizer steps: columns, bounds at the left, steps below."""

    def draw(data: Mapping[str, Any], width: int, height: int) -> Text:
        values, steps = data["curves"][name], data["curves"]["step"]
        known = [value for value in values if value is not None]
        rows, room = height - 1, width - MARGIN - 1
        if not known or rows < 1 or room < 4:
            return placeholder("no step yet" if not steps else "not reported by this run", width)
        # The whole height is for the metric's real range, whose bounds are written next to it.
        low, high = min(known), max(known)
        drawn = columns_of(resampled(values, room), rows, low, high)
        text = []
        for number, row in enumerate(drawn):
            label = short(high) if number == 0 else short(low) if number == rows - 1 else ""
            text.append(Text.assemble((fitted(label, MARGIN, right=True), MUTED), ("▕", GRID), coloured(row, style)))
        text.append(_axis(steps, known[-1], room))
        return lines(text, width, height)

    return draw


def _axis(steps: list[float | None], last: float, room: int) -> Text:
    first, end = f"step {steps[0] or 0:.0f}", f"{steps[-1] or 0:.0f}"
    now = f"now {short(last)}"
    line = Text(" " * (MARGIN + 1))
    # First and last step with the newest value between them if they fit, else the value alone.
    between = room - len(first) - len(end) - len(now)
    if between < 2:
        return line.append(fitted(now, room, right=True), "bold")
    line.append(first, MUTED).append(" " * (between // 2)).append(now, "bold")
    return line.append(" " * (between - between // 2)).append(end, MUTED)


def draw_head(data: Mapping[str, Any], width: int, _height: int = 1) -> Text:
    """A line with run, health, step, reward, workers, weights, the age of the last step, and the algorithm."""
    loop = data["loop"]
    reward, age, most = loop["reward"], loop["step_age_s"], loop["max_steps"]
    parts = [
        (f" {plain_text(loop['run'])}", "bold"),
        (f"● {loop['health']}", HEALTHS.get(loop["health"], WARN)),
        (f"step {loop['step']}" + (f" of {most}" if most else ""), "bold"),
        ("" if reward is None else f"reward {short(reward)}", GOOD),
        (f"{loop['workers']} workers", ""),
        (f"weights {loop['announced']}", ""),
        ("" if age is None else f"last step {age:.0f} s ago", MUTED),
        (plain_text(loop["algorithm"]), MUTED),
    ]
    text = Text()
    for part, style in parts:
        # From the left, as long as the next part fits: the important parts come first.
        if part and (not text or text.cell_len + 2 + cell_len(part) <= width):
            text.append("  " if text else "").append(part, style)
    return lines([text], width, 1)


def draw_events(data: Mapping[str, Any], width: int, height: int) -> Text:
    """Events with their times, newest first."""
    events = data["events"]
    if not events:
        return placeholder("no events yet", width)
    rows = []
    for _, at, level, event, times in reversed(events[-height:] if height else []):
        row = Text.assemble(
            (time.strftime("%H:%M:%S ", time.localtime(at)), MUTED), (plain_text(event), EVENT_LEVELS[level])
        )
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
    """A line for a trajectory: as many columns as fit, and the start of its text."""
    # Only the number of the last version: the lineage rarely changes within a trajectory.
    versions, fate = row["versions"], row["fate"]
    held = versions[0] if len(versions) == 1 else f"{versions[0]}…{versions[-1].rpartition('-')[2]}"
    cells = {**row, "tokens": row["length"], "reward": short(row["reward"]), "weights": held}
    text = Text(no_wrap=True)
    for name, size in _columns(width).items():
        style = "" if name != "fate" else GOOD if fate.startswith("trained") else WARN if "skip" in fate else MUTED
        text.append(fitted(plain_text(str(cells[name])), size, right=name in NUMBERS), style).append(" ")
    if width - text.cell_len > 8:
        text.append(plain_text(row["text"][:120]), MUTED)
    text.rstrip()
    text.truncate(max(0, width), overflow="ellipsis")
    return text


def head_of_rows(width: int) -> Text:
    """A line with the names of the columns."""
    names = (fitted(name, size, right=name in NUMBERS) for name, size in _columns(width).items())
    return lines([Text(" ".join(names).rstrip(), MUTED)], width, 1)


def draw_rows(data: Mapping[str, Any], width: int, height: int) -> Text:
    """A table of the newest trajectories."""
    rows = data["trajectories"]
    if not rows:
        return placeholder("no trajectory yet", width)
    return lines([head_of_rows(width), *(row_of(row, width) for row in rows[: height - 1])], width, height)


def preview(row: Mapping[str, Any]) -> Text:
    """The facts of a trajectory that need no read of its record from the topic."""
    text = Text.assemble(
        (plain_text(row["id"]), "bold"), ("  at ", MUTED), row["place"], ("  ", ""), (row["fate"], ACCENT)
    )
    facts = f"{row['worker']}, bucket {row['bucket']}, {row['seconds']:.1f} s, ended by {row['finish']}"
    text.append(f"\n{plain_text(facts)}", MUTED)
    held = plain_text(" to ".join(row["versions"]))
    text.append(f"\n{row['length']} tokens, {row['predicted']} predicted; weights {held}")
    text.append(f"\nreward {short(row['reward'])}\n\n", "bold").append(_paragraphs(row["text"]))
    return text.append("\n\nEnter shows the whole record: prompt, text, reward parts, versions", MUTED)


def whole(trajectory: Trajectory, place: str, fate: str, command: str) -> Text:
    """A trajectory in full: rewards, the weights of each range of tokens, prompt and completion."""
    count = len(trajectory.token_ids)
    text = Text.assemble((plain_text(trajectory.trajectory_id), "bold"), ("  at ", MUTED), place, "  ", (fate, ACCENT))
    text.append(
        f"\nsample {trajectory.sample_index + 1} of {trajectory.num_generations}, {plain_text(trajectory.worker_id)}, "
        f"bucket {trajectory.bucket}, ended by {trajectory.finish_reason.value}, "
        f"{trajectory.finished_at - trajectory.started_at:.1f} s",
        MUTED,
    )
    text.append(f"\n{count} tokens, {trajectory.predicted_length} predicted")
    _part(text, "rewards")
    for name, value in sorted(trajectory.rewards.items()):
        text.append(f"\n  {plain_text(name)} ").append(short(value), f"bold {GOOD if value else WARN}")
    for name, error in sorted(trajectory.reward_errors.items()):
        text.append(f"\n  {plain_text(name)} failed: {plain_text(str(error))}", BAD)
    _part(text, "weights by token")
    # Colours repeat, but neighbours differ.
    for number, span in enumerate(trajectory.version_spans):
        style = SERIES[number % len(SERIES)]
        held = plain_text(trajectory.named(span.version))
        text.append(f"\n  {held}".ljust(11), f"bold {style}").append(f" tokens {span.start} to {span.end - 1}")
    _part(text, "prompt")
    text.append("\n" + _paragraphs(trajectory.prompt_text))
    _part(text, "completion")
    text.append("\n" + _paragraphs(trajectory.completion_text))
    return text.append(f"\n\n{command}", MUTED)


def _part(text: Text, title: str) -> None:
    text.append(f"\n\n{title}", f"bold {ACCENT}")


def _paragraphs(text: str) -> str:
    cut = text[:SHOWN_CHARACTERS] + ("…" if len(text) > SHOWN_CHARACTERS else "")
    return "\n".join(plain_text(line) for line in cut.split("\n"))
