"""The loop: prompts, workers, topic and trainer as boxes, rates on the arrows between them, weights on the way back."""

from collections.abc import Mapping
from typing import Any

from rich.cells import cell_len
from rich.text import Text

from deploy.top.drawing.blocks import ACCENT, BAD, GRID, MUTED, WARN, first_that_fits, fitted, lines, short

BOXES = (11, 13, 16, 11)
ROOMY = (15, 19, 22, 19)
"""Widths of the four boxes, borders included, on narrow and on wide screens."""
ROOMY_FROM = 110
ARROWS = 3


def draw_loop(data: Mapping[str, Any], width: int, height: int) -> Text:
    """Six rows, from 75 columns on; below that, the same in words."""
    loop, lag = data["loop"], data["lag"]
    boxes = ROOMY if width >= ROOMY_FROM else BOXES
    gap = (width - sum(boxes)) // ARROWS
    if gap < 8 or height < 5:
        return _in_words(loop, width, height)
    rates, tokens = loop["rates"], short(loop["rates"]["tokens"])
    waiting = _waiting(lag)
    contents = (
        ("prompts", f"{short(loop['totals']['orders'])} sent"),
        ("workers", f"{loop['running']}/{loop['capacity']} run"),
        ("trajectories", "" if waiting is None else f"{short(waiting)} untrained"),
        ("trainer", f"step {loop['step']}"),
    )
    arrows = (
        (rates["orders"], "orders"),
        (rates["trajectories"], first_that_fits((f"{tokens} tokens/s", f"{tokens} tok/s", f"tok {tokens}"), gap)),
        (rates["trained"], "trained"),
    )
    details = (loop["algorithm"], f"{loop['workers']} alive", _refused(loop, boxes[2] - 3), f"at {loop['version']}")
    rows = [Text(), Text(), Text(), Text()]
    for index, box in enumerate(boxes):
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


def _waiting(lag: Mapping[str, Any]) -> int | None:
    known = [count for count in lag["unfinished"] if count is not None]
    return sum(known) if known else sum(lag["unread"]) if lag["unread"] else None


def _refused(loop: Mapping[str, Any], width: int) -> str:
    skipped, letters = sum(loop["skips"].values()), loop["totals"]["dead_letters"]
    if not letters:
        return f"{short(skipped)} skipped" if skipped else ""
    dead = f"{short(letters)} dead"
    return first_that_fits((f"{short(skipped)} skipped, {dead}", dead), width) if skipped else dead


def _box(content: tuple[str, str], detail: str, width: int) -> list[Text]:
    """Four rows; the name stands in the upper border."""
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
    """The rate within the line, which is drawn bold while something flows."""
    style = ACCENT if rate else MUTED
    word = f" {short(rate)}/s "
    word = first_that_fits((word, word.strip()), gap - 2)
    before = (gap - len(word)) // 2
    return Text.assemble(("─" * before, style), (word, "bold"), ("─" * (gap - 1 - before - len(word)) + "▶", style))


def _way_back(loop: Mapping[str, Any], boxes: tuple[int, ...], gap: int) -> list[Text]:
    """From under the trainer back to under the workers."""
    begin = boxes[0] + gap + boxes[1] // 2
    end = sum(boxes[:3]) + ARROWS * gap + boxes[3] // 2
    rate = loop["rates"]["weights"]
    style = ACCENT if rate else MUTED
    word = f" weights {loop['announced']} · {short(rate * 60)}/min "
    rest = max(0, end - begin - 1 - cell_len(word))
    up = Text.assemble(" " * begin, ("▲", style), " " * (end - begin - 1), ("│", style))
    back = Text.assemble(
        " " * begin, ("╰" + "─" * (rest // 2), style), (word, "bold"), ("─" * (rest - rest // 2) + "╯", style)
    )
    return [up, back]


def _centred(text: str, width: int) -> str:
    return text.center(width) if cell_len(text) <= width else fitted(text, width)


def _in_words(loop: Mapping[str, Any], width: int, height: int) -> Text:
    rates = loop["rates"]
    rows = [
        f"orders {short(rates['orders'])}/s → {loop['workers']} workers, {loop['running']}/{loop['capacity']} running",
        f"trajectories {short(rates['trajectories'])}/s, {short(rates['tokens'])} tokens/s",
        f"trained {short(rates['trained'])}/s, step {loop['step']}, weights {loop['version']}",
    ]
    return lines([Text(row) for row in rows], width, height)
