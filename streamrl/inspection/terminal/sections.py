"""The panels of `streamrl top`: the loop with its rates, lengths, lag, staleness, workers, and shares of the time.

Each function takes sections of a snapshot, a width and a height in cells, and returns a text that fits them.
"""

from collections.abc import Mapping
from typing import Any

from rich.cells import cell_len
from rich.text import Text

from streamrl.inspection.terminal.drawing import (
    ACCENT,
    BAD,
    GOOD,
    GRID,
    KINDS,
    MUTED,
    SERIES,
    WARN,
    bar,
    coloured,
    first_that_fits,
    fitted,
    lines,
    placeholder,
    short,
)
from streamrl.observability.run_state.aggregates import PER_DOUBLING, WITHIN
from streamrl.observability.run_state.figures import span_text
from streamrl.schemas.plain_text import plain_text
from streamrl.settings.features import displays

SHADES = "░▒▓█"
CELL, TALLEST = 2, 2
"""Least width in columns and largest height in rows of a heat map's cell: terminal cells are twice as tall as wide."""
LABEL = 6
BOXES = (11, 13, 16, 11)
ROOMY = (15, 19, 22, 19)
"""Widths of the four boxes, borders included, on narrow and on wide screens."""
LOOP_ROOMY_FROM = 110
ARROWS = 3
NAME, STATE = 16, 9
WIDEST_BAR = 30
WORKERS_ROOMY_FROM = 60
STATES = {"silent": BAD, "stopped": MUTED, "draining": WARN, "ready": GOOD}


def draw_loop(data: Mapping[str, Any], width: int, height: int) -> Text:
    """The loop as boxes and arrows in six rows if it is wide enough (from 75 columns on), else in words."""
    loop, lag = data["loop"], data["lag"]
    boxes = ROOMY if width >= LOOP_ROOMY_FROM else BOXES
    # The width that the boxes leave is divided among the arrows between them.
    gap = (width - sum(boxes)) // ARROWS
    if gap < 8 or height < 5:
        return _in_words(loop, width, height)
    tokens, left = short(loop["sampled_tokens_per_s"]), loop["time_left_s"]
    contents = (
        ("prompts", loop["algorithm"]),
        ("workers", f"{loop['running']}/{loop['capacity']} run"),
        ("trajectories", f"lag {short(sum(lag['lag']))}" if lag["buckets"] else ""),
        ("trainer", _step(loop, boxes[3] - 3)),
    )
    arrows = (
        (loop["ordered_per_s"], "ordered"),
        (loop["sampled_per_s"], first_that_fits((f"{tokens} tokens/s", f"{tokens} tok/s", f"tok {tokens}"), gap)),
        (loop["trajectories_per_s"], "trained"),
    )
    time_left = first_that_fits((f"{span_text(left)} left", span_text(left)), boxes[3] - 3) if left else "no pace yet"
    details = ("", f"{loop['workers']} alive", _refused(loop, boxes[2] - 3), time_left)
    rows = [Text(), Text(), Text(), Text()]
    for index, box in enumerate(boxes):
        # Each box adds a part to the four rows of text.
        for row, part in zip(rows, _box(contents[index], details[index], box), strict=True):
            row.append_text(part)
        if index < ARROWS:
            rate, label = arrows[index]
            rows[0].append(" " * gap)
            rows[1].append_text(_arrow(rate, gap))
            rows[2].append(_centred(label, gap), MUTED)
            rows[3].append(" " * gap)
    rows += _way_back(loop, boxes, gap)
    return lines(rows, width, height)


def _step(loop: Mapping[str, Any], width: int) -> str:
    step, most = loop["step"], loop["max_steps"]
    return first_that_fits((*([f"step {step}/{most}", f"{step}/{most}"] if most else []), f"step {step}"), width)


def _refused(loop: Mapping[str, Any], width: int) -> str:
    skipped, dead_letters = loop["skipped"], loop["dead_letters"]
    if not dead_letters:
        return f"{short(skipped)} skipped" if skipped else ""
    dead = f"{short(dead_letters)} dead"
    return first_that_fits((f"{short(skipped)} skipped, {dead}", dead), width) if skipped else dead


def _box(content: tuple[str, str], detail: str, width: int) -> list[Text]:
    """A box of four rows, with the name in the upper border."""
    name, first = content
    inner = width - 2
    top = Text.assemble(("╭ ", GRID), (name, f"bold {ACCENT}"), (" " + "─" * (inner - len(name) - 2) + "╮", GRID))
    body = [
        Text.assemble(("│", GRID), fitted(f" {first}", inner), ("│", GRID)),
        Text.assemble(("│", GRID), (fitted(f" {detail}", inner), _detail_style(detail)), ("│", GRID)),
    ]
    return [top, *body, Text("╰" + "─" * inner + "╯", GRID)]


def _detail_style(detail: str) -> str:
    return BAD if detail.endswith("dead") else WARN if detail.endswith("skipped") else MUTED


def _arrow(rate: float, gap: int) -> Text:
    """An arrow with the rate in it, coloured while the rate is not zero."""
    style = ACCENT if rate else MUTED
    word = f" {short(rate)}/s "
    word = first_that_fits((word, word.strip()), gap - 2)
    before = (gap - len(word)) // 2
    return Text.assemble(("─" * before, style), (word, "bold"), ("─" * (gap - 1 - before - len(word)) + "▶", style))


def _way_back(loop: Mapping[str, Any], boxes: tuple[int, ...], gap: int) -> list[Text]:
    """Two rows with the arrow of the weights, from below the trainer back to below the workers."""
    # From the middle of the trainer's box to the middle of the workers' box.
    begin = boxes[0] + gap + boxes[1] // 2
    end = sum(boxes[:3]) + ARROWS * gap + boxes[3] // 2
    rate = loop["weights_per_min"]
    style = ACCENT if rate else MUTED
    word = f" weights {loop['announced']} · {short(rate)}/min "
    rest = max(0, end - begin - 1 - cell_len(word))
    up = Text.assemble(" " * begin, ("▲", style), " " * (end - begin - 1), ("│", style))
    back = Text.assemble(
        " " * begin, ("╰" + "─" * (rest // 2), style), (word, "bold"), ("─" * (rest - rest // 2) + "╯", style)
    )
    return [up, back]


def _centred(text: str, width: int) -> str:
    return text.center(width) if cell_len(text) <= width else fitted(text, width)


def _in_words(loop: Mapping[str, Any], width: int, height: int) -> Text:
    fleet = f"{loop['workers']} workers, {loop['running']}/{loop['capacity']} running"
    rows = [
        f"ordered {short(loop['ordered_per_s'])}/s → {fleet}",
        f"sampled {short(loop['sampled_per_s'])}/s, {short(loop['sampled_tokens_per_s'])} tokens/s",
        f"trained {short(loop['trajectories_per_s'])}/s, {_step(loop, width)}, weights {loop['version']}",
    ]
    return lines([Text(row) for row in rows], width, height)


def draw_lengths(data: Mapping[str, Any], width: int, height: int) -> Text:
    """A heat map of actual lengths (rows, longest first) by predicted lengths. The diagonal means a good prediction."""
    lengths = data["lengths"]
    rows = height - 2
    if not lengths["cells"]:
        return placeholder("no trajectory yet", width)
    cells, first, join = _joined(lengths["cells"], min(rows, (width - LABEL - 1) // CELL))
    if rows < 1 or not cells:
        return lines([_judgement(lengths, width)], width, height)
    # Cells as tall as wide, so that the diagonal looks like one.
    count = 1 + max(max(cell) for cell in cells)
    tall = max(1, min(TALLEST, rows // count))
    wide = max(CELL, min(CELL * TALLEST, (width - LABEL - 1) // count))
    # Neighbouring classes are within a factor of 1.5 of each other, unless classes were joined.
    near = 1 if join == 1 else 0
    drawn = []
    for actual in range(count - 1, -1, -1):
        label = _tokens(first + actual * join) if tall > 1 or count < 4 or actual % 2 == 0 else ""
        row = Text(no_wrap=True)
        for predicted in range(count):
            style = ACCENT if abs(actual - predicted) <= near else WARN
            shade = _shade(cells.get((predicted, actual), 0) / max(cells.values()))
            row.append_text(coloured(shade * wide, style))
        for part in range(tall):
            margin = Text(fitted("" if part else label, LABEL, right=True), MUTED).append("▕", GRID)
            drawn.append(margin.append_text(row))
    drawn += [_axis(_tokens(first), _tokens(first + (count - 1) * join), count * wide), _judgement(lengths, width)]
    return lines(drawn, width, height)


def _axis(left: str, right: str, room: int) -> Text:
    between = room - len(left) - len(right)
    axis = left + "predicted".center(between) + right if between > 10 else f"{left} to {right} predicted"
    return Text(" " * (LABEL + 1) + axis, MUTED)


def _joined(rows: list[list[int]], room: int) -> tuple[dict[tuple[int, int], int], int, int]:
    """Joins neighbouring classes to fit the room: counts by (predicted, actual) from 0 on, the first class, and how
    many classes were joined into one.
    """
    ends = [index for predicted, actual, _ in rows for index in (predicted, actual)]
    first, span = min(ends), max(ends) - min(ends) + 1
    if room < 1:
        return {}, first, 1
    # Rounded up, so that the joined classes fit.
    join = -(-span // room)
    cells: dict[tuple[int, int], int] = {}
    for predicted, actual, count in rows:
        cell = (predicted - first) // join, (actual - first) // join
        cells[cell] = cells.get(cell, 0) + count
    return cells, first, join


def _tokens(length_class: int) -> str:
    """The length in tokens at the middle of a class."""
    return short(round(2 ** (length_class / PER_DOUBLING)))


def _shade(share: float) -> str:
    # The root, because counts near the diagonal are far larger than the others, which should be visible too.
    return SHADES[min(3, int(4 * share**0.5))] if share > 0 else " "


def _judgement(lengths: Mapping[str, Any], width: int) -> Text:
    if lengths["close"] is None:
        return placeholder("no trajectory yet", width)
    return Text.assemble(
        ("within ×", MUTED), (f"{WITHIN:g}", MUTED), (f" {lengths['close']:.0%}", "bold"),
        ("  off by ×", MUTED), (f"{lengths['factor']:.2f}", "bold"),
    )  # fmt: skip


def draw_lag(data: Mapping[str, Any], width: int, height: int) -> Text:
    """A bar per bucket: trajectories that the trainer has not finished."""
    lag = data["lag"]
    if not lag["buckets"]:
        return placeholder("no trajectory yet", width)
    # At least 1, so that the division works without lag.
    most = max(1, *lag["lag"])
    room = max(1, width - 9 - 6)  # between a name of 9 cells and a number of 6
    rows = []
    for bucket, count in zip(lag["buckets"], lag["lag"], strict=True):
        style = SERIES[bucket % len(SERIES)]
        row = Text.assemble((fitted(f"bucket {bucket}", 9), MUTED), (bar(count / most, room), style))
        rows.append(row.append(fitted(short(count), 6, right=True), "bold"))
    if len(rows) > height > 0:
        rest = sum(lag["lag"][height - 1 :])
        rows = [*rows[: height - 1], Text(f"and {len(rows) - height + 1} more buckets: {short(rest)}", MUTED)]
    return lines(rows, width, height)


def draw_staleness(data: Mapping[str, Any], width: int, height: int) -> Text:
    """Shares of trained trajectories by the age of their oldest token, in optimizer steps."""
    counts = data["staleness"]["counts"]
    total = sum(count for _, count in counts)
    if not total:
        return placeholder("nothing trained yet", width)
    most = max(count for _, count in counts)
    room = max(1, width - 9 - 7)
    rows = []
    for age, count in counts:
        row = Text.assemble((fitted(f"{age} step{'s' if age != 1 else ''}", 9), MUTED))
        row.append(bar(count / most, room), ACCENT).append(fitted(f"{count / total:.1%}", 7, right=True), "bold")
        rows.append(row)
    if len(rows) > height > 0:
        rest = sum(count for _, count in counts[height - 1 :])
        rows = [*rows[: height - 1], Text(f"older: {rest / total:.1%}", MUTED)]
    return lines(rows, width, height)


def draw_workers(data: Mapping[str, Any], width: int, height: int) -> Text:
    """A row per worker: state, weights and how many versions they are behind, slots, tokens a second. Then the rows of
    features.
    """
    workers = data["workers"]
    if not workers:
        return placeholder("no worker yet", width)
    name = min(NAME, max(6, *(cell_len(plain_text(worker["id"])) for worker in workers)))
    # 26 cells: weights (11), slots (9), tokens a second (6). Without room for the state, the name has the state's
    # colour.
    state = STATE if width >= name + 1 + STATE + 26 else 0
    room = min(WIDEST_BAR, width - name - 1 - state - 26)
    # A bar of one or two cells would show nothing.
    room = room if room > 2 else 0
    head = f"{'worker':{name}} {'state':{STATE}}" if state else f"{'worker':{name}} "
    rows = [Text(f"{head}{'weights':11}{'slots':{room + 9}}{'tok/s':>6}", MUTED)]
    rows += [_worker(worker, name, state, room) for worker in workers]
    for display in displays():
        rows += display.worker_rows(data, name)
    if len(rows) > height > 1:
        rows = [*rows[: height - 1], Text(f"and {len(rows) - height + 1} more", MUTED)]
    return lines(rows, width, height)


def _worker(worker: Mapping[str, Any], name: int, state: int, room: int) -> Text:
    behind = worker["behind"]
    version = worker["version"] + (f" −{behind}" if behind else "")
    capacity = max(1, worker["capacity"])
    style = STATES.get(worker["state"], "")
    row = Text(no_wrap=True).append(fitted(plain_text(worker["id"]), name), "" if state else style).append(" ")
    if state:
        row.append(fitted(worker["state"], state), style)
    row.append(fitted(version, 11), GOOD if behind == 0 else WARN if behind < 3 else BAD)
    if room:
        row.append(bar(worker["running"] / capacity, room - 1), KINDS["generate"]).append(" ")
    waiting = f"+{worker['waiting']}" if worker["waiting"] else ""
    row.append(fitted(f"{worker['running']}/{worker['capacity']}{waiting}", 9))
    return row.append(fitted(short(worker["tokens_per_s"]), 6, right=True), "bold")


def draw_split(data: Mapping[str, Any], width: int, height: int) -> Text:
    """A stacked bar per process: its shares of the last minute."""
    split = data["split"]
    if not split:
        return placeholder("no activity yet", width)
    legend = Text()
    mark = "█ " if width >= WORKERS_ROOMY_FROM else "█"
    # Only kinds that are drawn, in the order of ``KINDS``, as in the stacks below.
    done = {kind for row in split for kind in row["shares"]} | {"wait"}
    for kind in (kind for kind in KINDS if kind in done):
        legend.append(mark, KINDS[kind]).append(f"{kind} ", MUTED)
    room = max(1, width - 12 - 10)
    rows = [legend, *(_stacked(row, room) for row in split)]
    if len(rows) > height > 1:
        rows = [*rows[: height - 1], Text(f"and {len(rows) - height + 1} more", MUTED)]
    return lines(rows, width, height)


def _stacked(row: Mapping[str, Any], room: int) -> Text:
    text = Text(fitted(plain_text(row["name"]), 12))
    drawn, share_so_far = 0, 0.0
    for kind in (kind for kind in KINDS if kind in row["shares"]):
        share_so_far += row["shares"][kind]
        # From the sum of the shares so far: shares that are rounded one by one would not add up to the width.
        until = min(room, round(share_so_far * room))
        text.append("█" * max(0, until - drawn), KINDS[kind])
        drawn = max(drawn, until)
    text.append("█" * (room - drawn), GRID)
    return text.append(fitted(f"{1 - row['wait']:.0%} busy", 10, right=True), "bold")
