"""A bordered part of the screen that draws sections of the snapshot, and which of them there are on each tab."""

from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

from rich.text import Text
from textual.widget import Widget

from deploy.top.drawing.blocks import KINDS, WARN
from deploy.top.drawing.curves import curve
from deploy.top.drawing.lengths import draw_lag, draw_lengths, draw_staleness
from deploy.top.drawing.loop import draw_loop
from deploy.top.drawing.records import draw_events, draw_head, draw_rows
from deploy.top.drawing.workers import draw_split, draw_workers

Sections = Mapping[str, Any]


class Drawing(NamedTuple):
    """What a panel shows: its title, the sections it needs, and how they are drawn."""

    title: str
    needs: tuple[str, ...]
    draw: Callable[[Sections, int, int], Text]


HEAD = Drawing("", ("loop",), draw_head)
LOOP = Drawing("loop", ("loop", "lag"), draw_loop)
REWARD = Drawing("reward", ("curves",), curve("reward"))
LENGTH = Drawing("mean length, tokens", ("curves",), curve("completions/mean_length", KINDS["checkpoint"]))
LENGTHS = Drawing("predicted × actual length", ("lengths",), draw_lengths)
LAG = Drawing("lag by length bucket", ("lag",), draw_lag)
STALENESS = Drawing("staleness of what was trained", ("staleness",), draw_staleness)
SPLIT = Drawing("time, last minute", ("split",), draw_split)
WORKERS = Drawing("workers", ("workers",), draw_workers)
ROWS = Drawing("last trajectories", ("trajectories",), draw_rows)
EVENTS = Drawing("events", ("events",), draw_events)

BOARD = {
    "reward": REWARD,
    "length": LENGTH,
    "lengths": LENGTHS,
    "lag": LAG,
    "staleness": STALENESS,
    "split": SPLIT,
    "workers": WORKERS,
    "rows": ROWS,
    "events": EVENTS,
}
"""Of the first tab, by the name that the style sheet knows; small screens show some of them."""
CURVES = (
    REWARD,
    LENGTH,
    Drawing("staleness, steps", ("curves",), curve("off_policy/mean", WARN)),
    Drawing("trainer's busy share", ("curves",), curve("time/train_share", KINDS["train"])),
    Drawing("entropy", ("curves",), curve("entropy", KINDS["optimizer"])),
    Drawing("gradient norm", ("curves",), curve("grad_norm", KINDS["publish"])),
)


class Panel(Widget):
    """Draws again only when a section that it needs has changed."""

    def __init__(self, drawing: Drawing, name: str | None = None, classes: str = "panel") -> None:
        super().__init__(id=name, classes=classes)
        self.drawing = drawing
        self.border_title = drawing.title
        self.shown: dict[str, Any] = {}

    def show(self, sections: Sections) -> bool:
        """Take sections over; whether there was anything new."""
        new = {name: sections[name] for name in self.drawing.needs}
        if new == self.shown:
            return False
        self.shown = new
        self.refresh()
        return True

    def render(self) -> Text:
        """As Textual asks for it."""
        width, height = self.content_size
        return self.drawing.draw(self.shown, width, height) if self.shown else Text()
