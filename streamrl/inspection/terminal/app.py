"""The Textual application: tabs of panels over a live state, drawn at the pace that is given, or when a key asks.

Invariants, each with a test of its name:
- only_what_is_in_sight_is_drawn: sections that no visible panel needs are not even put together;
- what_did_not_change_is_not_drawn_again.
"""

import time
from collections.abc import Awaitable, Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, ClassVar, NamedTuple

from rich.text import Text
from textual import events
from textual.app import App, ComposeResult
from textual.binding import Binding, BindingType
from textual.containers import Container, Grid, Horizontal, Vertical, VerticalScroll
from textual.screen import ModalScreen
from textual.theme import Theme
from textual.widget import Widget
from textual.widgets import Footer, OptionList, Static, TabbedContent, TabPane
from textual.widgets.option_list import Option

from streamrl.inspection.terminal.drawing import (
    ACCENT,
    BAD,
    KINDS,
    MUTED,
    WARN,
    curve,
    draw_events,
    draw_head,
    draw_rows,
    head_of_rows,
    preview,
    row_of,
    whole,
)
from streamrl.inspection.terminal.sections import (
    draw_lag,
    draw_lengths,
    draw_loop,
    draw_split,
    draw_staleness,
    draw_workers,
)
from streamrl.observability.run_state.pace import OFTEN_S
from streamrl.observability.run_state.snapshot import sections_of
from streamrl.observability.run_state.state import RunState
from streamrl.schemas.errors import StreamRLError
from streamrl.schemas.plain_text import plain_text
from streamrl.schemas.trajectories import Trajectory
from streamrl.settings.features import feature_sections

INTERRUPTED = 130
"""Exit code after Ctrl-C, as of a shell."""
SLOW = {"curves": 2, "lengths": 2, "staleness": 2, "split": 2}
"""Sections that are rendered every so many ticks: they are large, and change slowly."""
KEYS = (
    ("1 … 6, ← →", "tabs"),
    ("↑ ↓, Enter", "choose a trajectory, read it whole"),
    ("Tab", "to the detail and back; ↑ ↓ scroll it"),
    ("f", "follow the newest trajectories again"),
    ("space", "hold the display, go on"),
    ("?", "this help"),
    ("q", "leave; the run goes on"),
)
MEANINGS = (
    ("lag", "trajectories that the trainer has not finished: neither trained nor skipped"),
    ("staleness", "steps between the oldest token's weights and those improved"),
    ("−2", "a worker is two weight versions behind"),
    ("busy", "share of the last minute that was not waiting"),
)


class Help(ModalScreen[None]):
    """What the keys do and what the panels mean, over the screen until a key is pressed."""

    def compose(self) -> ComposeResult:
        """One box."""
        text = Text()
        for rows in (KEYS, MEANINGS):
            for name, meaning in rows:
                text.append(f"{name:<12}", f"bold {ACCENT}").append(f"{meaning}\n")
            text.append("\n")
        yield Static(text.append("any key closes this", MUTED), id="help")

    def on_key(self, event: events.Key) -> None:
        """Close."""
        event.stop()  # the key that closes it is to do nothing else
        self.dismiss()


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
WORKERS = Drawing("workers", ("workers", *feature_sections()), draw_workers)
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
    """A bordered part of the screen; draws again only when a section that it needs has changed."""

    def __init__(self, drawing: Drawing, name: str | None = None, classes: str = "panel") -> None:
        super().__init__(id=name, classes=classes)
        self.drawing = drawing
        self.border_title = drawing.title
        self.shown: dict[str, Any] = {}

    def show(self, sections: Sections) -> bool:
        """Take sections over; whether there was anything new."""
        new = {name: sections[name] for name in self.drawing.needs}
        # Drawing costs far more than comparing: most sections do not change within a second.
        if new == self.shown:
            return False
        self.shown = new
        self.refresh()
        return True

    def render(self) -> Text:
        """As Textual asks for it."""
        width, height = self.content_size
        return self.drawing.draw(self.shown, width, height) if self.shown else Text()


Read = Callable[[str], Awaitable[Trajectory]]
"""Reads the record at ``partition@offset``; raises an error of ours if it is gone or the broker does not answer."""
Row = Mapping[str, Any]


class Trajectories(Container):
    """The tab of trajectories: the newest as a list, and one of them in detail.

    Follows the newest until another row is chosen; then the list stands still.
    """

    def __init__(self, read: Read, run_path: str) -> None:
        super().__init__(id="trajectories")
        self.read, self.run_path = read, run_path
        self.rows: list[Row] = []
        self.held = False
        self.opened = ""
        self.width = 0

    def compose(self) -> ComposeResult:
        """List above or left, detail below or right."""
        with Container(id="listed", classes="panel") as listed:
            listed.border_title = "last trajectories"
            yield Static(id="columns")
            yield OptionList(id="list")
        with VerticalScroll(id="detail", classes="panel") as detail:
            detail.border_title = "trajectory"
            yield Static(id="told")

    def show(self, rows: Sequence[Row]) -> None:
        """Take the newest rows over, unless the list is held."""
        listed = self.query_one("#list", OptionList)
        width = listed.scrollable_content_region.width - 2
        # Filling a list costs hundreds of widgets; not for the same rows.
        if self.held or width < 1 or (list(rows) == self.rows and width == self.width):
            return
        self.rows, self.width = list(rows), width
        self.query_one("#columns", Static).update(head_of_rows(width))
        listed.clear_options()
        listed.add_options([Option(row_of(row, width)) for row in self.rows])
        if self.rows:
            # Sends ``OptionHighlighted``, by which the newest row is told in the detail.
            listed.highlighted = 0

    def follow(self) -> None:
        """Let the list go on."""
        self.held, self.opened = False, ""
        self._title()

    def on_option_list_option_highlighted(self, event: OptionList.OptionHighlighted) -> None:
        """Show what is known at once; any row but the newest holds the list."""
        # Messages wait in a queue: this one may be of a longer list, which was filled anew meanwhile.
        if event.option_index >= len(self.rows):
            return
        # Whoever moves down wants to read: rows that run away under the cursor cannot be.
        if event.option_index and not self.held:
            self.held = True
            self._title()
        row = self.rows[event.option_index]
        if row["place"] != self.opened:
            self.opened = ""
            self._tell(preview(row))

    def on_option_list_option_selected(self, event: OptionList.OptionSelected) -> None:
        """Read the whole record."""
        row = self.rows[event.option_index]
        self.held, self.opened = True, row["place"]
        self._title()
        # A task of its own, so that the screen does not stand still meanwhile; the reading of another row is cancelled.
        self.run_worker(self._open(row), exclusive=True)

    async def _open(self, row: Row) -> None:
        command = f"streamrl show {row['id']} {self.run_path}"
        try:
            told = whole(await self.read(row["place"]), row["place"], row["fate"], command)
        except StreamRLError as error:
            told = preview(row).append(f"\n{plain_text(str(error))}", BAD)
        # Another row may have been chosen while this one was read.
        if self.opened == row["place"]:
            self._tell(told)

    def _tell(self, text: Text) -> None:
        self.query_one("#told", Static).update(text)
        self.query_one("#detail", VerticalScroll).scroll_home(animate=False)

    def _title(self) -> None:
        self.query_one("#listed", Container).border_title = (
            "last trajectories, held (f follows again)" if self.held else "last trajectories"
        )


THEME = Theme(
    "streamrl", primary=ACCENT, accent=ACCENT, background="#0d1014", surface="#0d1014", panel="#14181e", dark=True
)
TABS = ("loop", "curves", "lengths", "workers", "trajectories", "events")


class TopApp(App[None]):
    """``read`` fetches a whole trajectory; ``run_path``: how the run is named on a command line; ``pace_s``: seconds
    between two looks.
    """

    CSS_PATH = Path(__file__).parent / "top.tcss"
    ENABLE_COMMAND_PALETTE = False
    # Columns and rows from which a screen has a class that the style sheet chooses panels by.
    HORIZONTAL_BREAKPOINTS = [(0, "-narrow"), (120, "-wide")]
    VERTICAL_BREAKPOINTS = [(0, "-low"), (40, "-high")]
    # With priority: asked before the widget that has the focus, which may have a use of its own for the key.
    BINDINGS: ClassVar[list[BindingType]] = [
        *(Binding(str(number), f"tab({number})", show=False) for number in range(1, len(TABS) + 1)),
        Binding("right", "turn(1)", show=False, priority=True),
        Binding("left", "turn(-1)", show=False, priority=True),
        Binding("space", "hold", "hold", priority=True),
        Binding("f,escape", "follow", "follow"),
        Binding("question_mark,h", "help", "help", key_display="?"),
        Binding("q", "quit", "quit", priority=True),
        Binding("ctrl+c", "interrupt", show=False, priority=True),
    ]

    def __init__(
        self,
        state: RunState,
        read: Read,
        run_path: str,
        clock: Callable[[], float] = time.time,
        pace_s: Callable[[], float] = lambda: OFTEN_S,
    ) -> None:
        super().__init__()
        self.register_theme(THEME)
        self.theme = THEME.name
        self.title = f"streamrl top  {state.run}"
        self.state, self.clock, self.pace_s = state, clock, pace_s
        self.sections: dict[str, Any] = {}
        # Kept, as every look asks them: no search through the tree of widgets each time.
        self.head = Panel(HEAD, "head", classes="")
        self.tabs = TabbedContent(id="tabs")
        self.listing = Trajectories(read, run_path)
        # Tick zero is one at which every section is due.
        self.ticks = 0
        self.held = False

    def compose(self) -> ComposeResult:
        """The line at the top, the tabs, the keys."""
        with Horizontal(id="top"):
            yield self.head
            yield Static(" held: space goes on ", id="held")
        with self.tabs:
            with TabPane("1 Loop", id="loop-tab"), Vertical():
                yield Panel(LOOP, "loop")
                with Grid(id="board"):
                    yield from (Panel(drawing, name) for name, drawing in BOARD.items())
            with TabPane("2 Curves", id="curves-tab"), Grid(id="curves"):
                yield from (Panel(drawing) for drawing in CURVES)
            with TabPane("3 Lengths", id="lengths-tab"), Grid(id="shapes"):
                yield Panel(LENGTHS, "heat")
                yield Panel(LAG)
                yield Panel(STALENESS)
            with TabPane("4 Workers", id="workers-tab"), Vertical():
                yield Panel(WORKERS)
                yield Panel(SPLIT)
            with TabPane("5 Trajectories", id="trajectories-tab"):
                yield self.listing
            with TabPane("6 Events", id="events-tab"):
                yield Panel(EVENTS)
        yield Footer(show_command_palette=False)

    def on_mount(self) -> None:
        """Begin to look."""
        # Panels have a size to draw for only once they were laid out.
        self.call_after_refresh(self.render_again)

    def render_again(self) -> None:
        """Look, and once more when it is time."""
        self.render_now()
        # A new timer each time rather than an interval, because the pace may have changed.
        self.set_timer(self.pace_s(), self.render_again)

    def render_now(self) -> None:
        """Draw what has changed since, of what is in sight."""
        # A timer may still ring while the screen is put up or taken down.
        if self.held or not self.head.is_attached or (pane := self.tabs.active_pane) is None:
            return
        now = self.state.known_until(self.clock())
        self.state.tick(now)
        panels = [panel for panel in (self.head, *pane.query(Panel)) if panel.display]
        listing = pane.id == "trajectories-tab"
        # Sections are put together for what is in sight only.
        needed = {name for panel in panels for name in panel.drawing.needs} | ({"trajectories"} if listing else set())
        sections = sections_of(self.state)
        for name in needed & sections.keys():
            # At once when a tab is first opened, at its own pace later.
            if name not in self.sections or not self.ticks % SLOW.get(name, 1):
                self.sections[name] = sections[name](now)
        for panel in panels:
            panel.show(self.sections)
        if listing:
            self.listing.show(self.sections["trajectories"])
        self.ticks += 1

    def render_anew(self) -> None:
        """Draw at once, whatever is due."""
        self.ticks = 0
        self.render_now()

    def on_tabbed_content_tab_activated(self, event: TabbedContent.TabActivated) -> None:
        """What was out of sight is old, and has a size only when the tab has been laid out."""
        if event.pane.id == "trajectories-tab":
            self.query_one("#list", OptionList).focus()
        self.call_after_refresh(self.render_anew)

    def on_resize(self) -> None:
        """Other panels may be in sight now."""
        self.call_after_refresh(self.render_anew)

    def action_tab(self, number: int) -> None:
        """Go to a tab, from 1."""
        self.tabs.active = f"{TABS[number - 1]}-tab"

    def action_turn(self, by: int) -> None:
        """Go to the next tab, or the one before."""
        active = self.tabs.active.removesuffix("-tab")
        self.action_tab((TABS.index(active) + by) % len(TABS) + 1)

    def action_interrupt(self) -> None:
        """Leave as a command that was interrupted; a run that shows this view stops then."""
        self.exit(return_code=INTERRUPTED)

    def action_hold(self) -> None:
        """Hold the display still, or let it go on."""
        self.held = not self.held
        self.query_one("#held", Static).display = self.held
        self.render_anew()

    def action_follow(self) -> None:
        """Let the list of trajectories go on."""
        self.listing.follow()
        self.render_anew()

    def action_help(self) -> None:
        """Explain."""
        self.push_screen(Help())
