"""Workers with the versions they hold, and what every process did with the last minute."""

from collections.abc import Mapping
from typing import Any

from rich.cells import cell_len
from rich.text import Text

from deploy.top.drawing.blocks import (
    BAD,
    GOOD,
    GRID,
    KINDS,
    MUTED,
    WARN,
    bar,
    fitted,
    lines,
    nothing,
    plain,
    short,
)

NAME, STATE = 16, 9
WIDEST_BAR = 30
ROOMY_FROM = 60
STATES = {"silent": BAD, "stopped": MUTED, "draining": WARN, "ready": GOOD}


def draw_workers(data: Mapping[str, Any], width: int, height: int) -> Text:
    """A row for each: state, weights and how many versions they are behind, slots, tokens a second."""
    workers = data["workers"]
    if not workers:
        return nothing("no worker was heard of yet", width)
    name = min(NAME, max(6, *(cell_len(plain(worker["id"])) for worker in workers)))
    state = STATE if width >= name + 1 + STATE + 26 else 0
    room = min(WIDEST_BAR, width - name - 1 - state - 26)
    room = room if room > 2 else 0
    head = f"{'worker':{name}} {'state':{STATE}}" if state else f"{'worker':{name}} "
    rows = [Text(f"{head}{'weights':11}{'slots':{room + 9}}{'tok/s':>6}", MUTED)]
    rows += [_worker(worker, name, state, room) for worker in workers]
    if len(rows) > height > 1:
        rows = [*rows[: height - 1], Text(f"and {len(rows) - height + 1} more", MUTED)]
    return lines(rows, width, height)


def _worker(worker: Mapping[str, Any], name: int, state: int, room: int) -> Text:
    behind = worker["behind"]
    version = worker["version"] + (f" −{behind}" if behind else "")
    capacity = max(1, worker["capacity"])
    style = STATES.get(worker["state"], "")
    row = Text(no_wrap=True).append(fitted(plain(worker["id"]), name), "" if state else style).append(" ")
    if state:
        row.append(fitted(worker["state"], state), style)
    row.append(fitted(version, 11), GOOD if behind == 0 else WARN if behind < 3 else BAD)
    if room:
        row.append(bar(worker["running"] / capacity, room - 1), KINDS["generate"]).append(" ")
    waiting = f"+{worker['waiting']}" if worker["waiting"] else ""
    row.append(fitted(f"{worker['running']}/{worker['capacity']}{waiting}", 9))
    return row.append(fitted(short(worker["tokens_per_s"]), 6, right=True), "bold")


def draw_split(data: Mapping[str, Any], width: int, height: int) -> Text:
    """A stacked bar for each process over the last minute."""
    split = data["split"]
    if not split:
        return nothing("nothing was done yet", width)
    legend = Text()
    mark = "█ " if width >= ROOMY_FROM else "█"
    done = {kind for row in split for kind in row["shares"]} | {"wait"}
    for kind in (kind for kind in KINDS if kind in done):
        legend.append(mark, KINDS[kind]).append(f"{kind} ", MUTED)
    room = max(1, width - 12 - 10)
    rows = [legend, *(_stacked(row, room) for row in split)]
    if len(rows) > height > 1:
        rows = [*rows[: height - 1], Text(f"and {len(rows) - height + 1} more", MUTED)]
    return lines(rows, width, height)


def _stacked(row: Mapping[str, Any], room: int) -> Text:
    text = Text(fitted(plain(row["name"]), 12))
    drawn, share_so_far = 0, 0.0
    for kind in (kind for kind in KINDS if kind in row["shares"]):
        share_so_far += row["shares"][kind]
        until = min(room, round(share_so_far * room))
        text.append("█" * max(0, until - drawn), KINDS[kind])
        drawn = max(drawn, until)
    text.append("█" * (room - drawn), GRID)
    return text.append(fitted(f"{1 - row['wait']:.0%} busy", 10, right=True), "bold")
