"""The Textual application: tabs with panels of a live state, drawn at a given pace and after a key press.

Invariants, each with a test of its name:
- only_visible_panels_are_drawn: sections that no visible panel needs are not even computed;
- unchanged_panels_are_not_drawn_again: a panel is drawn only if a section that it needs has changed.
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
"""Exit code after Ctrl-C, as in a shell."""
SLOW = {"curves": 2, "lengths": 2, "staleness": 2, "split": 2}
"""Ticks between two computations of a section that is large and changes slowly."""
KEYS = (
    ("1 … 6, ← →", "tabs"),
    ("↑ ↓, Enter", "choose a trajectory, show it in full"),
    ("Tab", "to the details and back; ↑ ↓ scroll them"),
    ("f", "follow the newest trajectories again"),
    ("space", "pause or resume the display"),
    ("?", "this help"),
    ("q", "quit; the run continues"),
)
MEANINGS = (
    ("lag", "trajectories that the trainer has not finished: neither trained nor skipped"),
    ("staleness", "steps between the oldest token's weights and the trained ones"),
    ("−2", "the worker is two weight versions behind"),
    ("busy", "share of the last minute without waiting"),
)


class Help(ModalScreen[None]):
    """Explains the keys and the panels, on top of the screen until a key is pressed."""

    def compose(self) -> ComposeResult:
        """One box with both lists."""
        text = Text()
        for rows in (KEYS, MEANINGS):
            for name, meaning in rows:
                text.append(f"{name:<12}", f"bold {ACCENT}").append(f"{meaning}\n")
            text.append("\n")
        yield Static(text.append("any key closes this", MUTED), id="help")

    def on_key(self, event: events.Key) -> None:
        """Close the help."""
        event.stop()  # the key that closes it must do nothing else
        self.dismiss()


Sections = Mapping[str, Any]


class Drawing(NamedTuple):
    """A panel's title, the sections that it needs, and the function that draws them."""

    title: str
    needs: tuple[str, ...]
    draw: Callable[[Sections, int, int], Text]


HEAD = Drawing("", ("loop",), draw_head)
LOOP = Drawing("loop", ("loop", "lag"), draw_loop)
REWARD = Drawing("reward", ("curves",), curve("reward"))
LENGTH = Drawing("mean length, tokens", ("curves",), curve("completions/mean_length", KINDS["checkpoint"]))
LENGTHS = Drawing("predicted × actual length", ("lengths",), draw_lengths)
LAG = Drawing("lag by length bucket", ("lag",), draw_lag)
STALENESS = Drawing("staleness of trained trajectories", ("staleness",), draw_staleness)
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
"""Panels of the first tab, by their names in the style sheet. Small screens show some of them."""
CURVES = (
    REWARD,
    LENGTH,
    Drawing("staleness, steps", ("curves",), curve("off_policy/mean", WARN)),
    Drawing("trainer's busy share", ("curves",), curve("time/train_share", KINDS["train"])),
    Drawing("entropy", ("curves",), curve("entropy", KINDS["optimizer"])),
    Drawing("gradient norm", ("curves",), curve("grad_norm", KINDS["publish"])),
)


class Panel(Widget):
    """A bordered part of the screen, drawn again only when a section that it needs has changed."""

    def __init__(self, drawing: Drawing, name: str | None = None, classes: str = "panel") -> None:
        super().__init__(id=name, classes=classes)
        self.drawing = drawing
        self.border_title = drawing.title
        self.shown: dict[str, Any] = {}

    def show(self, sections: Sections) -> bool:
        """Use these sections from now on. Returns whether any of them has changed."""
        new = {name: sections[name] for name in self.drawing.needs}
        # Drawing costs far more than comparing, and most sections do not change within a second.
        if new == self.shown:
            return False
        self.shown = new
        self.refresh()
        return True

    def render(self) -> Text:
        """The panel's text. Textual calls this."""
        width, height = self.content_size
        return self.drawing.draw(self.shown, width, height) if self.shown else Text()


Read = Callable[[str], Awaitable[Trajectory]]
"""Reads the record at ``partition@offset``. Raises a StreamRLError if it is deleted or the broker does not answer."""
Row = Mapping[str, Any]


class Trajectories(Container):
    """The tab of trajectories: a list of the newest, and one of them in detail.

    The list follows the newest trajectories until the user chooses another row. Then it is held.
    """

    def __init__(self, read: Read, run_path: str) -> None:
        super().__init__(id="trajectories")
        self.read, self.run_path = read, run_path
        self.rows: list[Row] = []
        self.held = False
        self.opened = ""
        self.width = 0

    def compose(self) -> ComposeResult:
        """The list above or to the left, the details below or to the right."""
        with Container(id="listed", classes="panel") as listed:
            listed.border_title = "last trajectories"
            yield Static(id="columns")
            yield OptionList(id="list")
        with VerticalScroll(id="detail", classes="panel") as detail:
            detail.border_title = "trajectory"
            yield Static(id="content")

    def show(self, rows: Sequence[Row]) -> None:
        """Show the newest rows, unless the list is held."""
        listed = self.query_one("#list", OptionList)
        width = listed.scrollable_content_region.width - 2
        # Filling a list creates hundreds of widgets, so it is not done for the same rows.
        if self.held or width < 1 or (list(rows) == self.rows and width == self.width):
            return
        self.rows, self.width = list(rows), width
        self.query_one("#columns", Static).update(head_of_rows(width))
        listed.clear_options()
        listed.add_options([Option(row_of(row, width)) for row in self.rows])
        if self.rows:
            # Sends ``OptionHighlighted``, which shows the newest row's details.
            listed.highlighted = 0

    def follow(self) -> None:
        """Let the list follow the newest trajectories again."""
        self.held, self.opened = False, ""
        self._update_title()

    def on_option_list_option_highlighted(self, event: OptionList.OptionHighlighted) -> None:
        """Show a preview of the row. Any row except the newest also holds the list."""
        # Messages wait in a queue: this one may be about a longer list that has been replaced in the meantime.
        if event.option_index >= len(self.rows):
            return
        # A user who moves down wants to read, so rows must not move away from the cursor.
        if event.option_index and not self.held:
            self.held = True
            self._update_title()
        row = self.rows[event.option_index]
        if row["place"] != self.opened:
            self.opened = ""
            self._show_text(preview(row))

    def on_option_list_option_selected(self, event: OptionList.OptionSelected) -> None:
        """Read the whole record."""
        row = self.rows[event.option_index]
        self.held, self.opened = True, row["place"]
        self._update_title()
        # In a task of its own, so that the screen keeps updating. It cancels the reading of another row.
        self.run_worker(self._open(row), exclusive=True)

    async def _open(self, row: Row) -> None:
        command = f"streamrl show {row['id']} --run {self.run_path}"
        try:
            text = whole(await self.read(row["place"]), row["place"], row["fate"], command)
        except StreamRLError as error:
            text = preview(row).append(f"\n{plain_text(str(error))}", BAD)
        # Another row may have been chosen while this one was read.
        if self.opened == row["place"]:
            self._show_text(text)

    def _show_text(self, text: Text) -> None:
        self.query_one("#content", Static).update(text)
        self.query_one("#detail", VerticalScroll).scroll_home(animate=False)

    def _update_title(self) -> None:
        self.query_one("#listed", Container).border_title = (
            "last trajectories, held (f: follow again)" if self.held else "last trajectories"
        )


THEME = Theme(
    "streamrl", primary=ACCENT, accent=ACCENT, background="#0d1014", surface="#0d1014", panel="#14181e", dark=True
)
TABS = ("loop", "curves", "lengths", "workers", "trajectories", "events")


class TopApp(App[None]):
    """The screen of `streamrl top`.

    ``read``: fetches a whole trajectory; ``run_path``: the run's name on a command line; ``pace_s``: seconds between
    two updates.
    """

    CSS_PATH = Path(__file__).parent / "top.tcss"
    ENABLE_COMMAND_PALETTE = False
    # Columns and rows from which a screen has a class. The style sheet chooses panels by these classes.
    HORIZONTAL_BREAKPOINTS = [(0, "-narrow"), (120, "-wide")]
    VERTICAL_BREAKPOINTS = [(0, "-low"), (40, "-high")]
    # With priority: checked before the focused widget, which may use the key itself.
    BINDINGS: ClassVar[list[BindingType]] = [
        *(Binding(str(number), f"tab({number})", show=False) for number in range(1, len(TABS) + 1)),
        Binding("right", "turn(1)", show=False, priority=True),
        Binding("left", "turn(-1)", show=False, priority=True),
        Binding("space", "hold", "pause", priority=True),
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
        # Kept, because every update needs them: no search through the tree of widgets each time.
        self.head = Panel(HEAD, "head", classes="")
        self.tabs = TabbedContent(id="tabs")
        self.listing = Trajectories(read, run_path)
        # At tick 0, every section is due.
        self.ticks = 0
        self.held = False

    def compose(self) -> ComposeResult:
        """The line at the top, the tabs, the keys."""
        with Horizontal(id="top"):
            yield self.head
            yield Static(" paused: space resumes ", id="held")
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
        """Start the updates."""
        # Panels have no size to draw for before they are laid out.
        self.call_after_refresh(self.render_again)

    def render_again(self) -> None:
        """Update, and schedule the next update."""
        self.render_now()
        # A new timer each time rather than an interval, because the pace may have changed.
        self.set_timer(self.pace_s(), self.render_again)

    def render_now(self) -> None:
        """Draw the visible panels that have changed."""
        # A timer may fire while the screen is being set up or closed.
        if self.held or not self.head.is_attached or (pane := self.tabs.active_pane) is None:
            return
        now = self.state.known_until(self.clock())
        self.state.tick(now)
        panels = [panel for panel in (self.head, *pane.query(Panel)) if panel.display]
        listing = pane.id == "trajectories-tab"
        # Only the sections of visible panels are computed.
        needed = {name for panel in panels for name in panel.drawing.needs} | ({"trajectories"} if listing else set())
        sections = sections_of(self.state)
        for name in needed & sections.keys():
            # At once when a tab is first opened, later at the section's own pace.
            if name not in self.sections or not self.ticks % SLOW.get(name, 1):
                self.sections[name] = sections[name](now)
        for panel in panels:
            panel.show(self.sections)
        if listing:
            self.listing.show(self.sections["trajectories"])
        self.ticks += 1

    def render_everything(self) -> None:
        """Compute all needed sections and draw at once."""
        self.ticks = 0
        self.render_now()

    def on_tabbed_content_tab_activated(self, event: TabbedContent.TabActivated) -> None:
        """Update the tab's panels, which are out of date, as soon as it is laid out and they have a size."""
        if event.pane.id == "trajectories-tab":
            self.query_one("#list", OptionList).focus()
        self.call_after_refresh(self.render_everything)

    def on_resize(self) -> None:
        """Update, because other panels may be visible now."""
        self.call_after_refresh(self.render_everything)

    def action_tab(self, number: int) -> None:
        """Go to a tab, counted from 1."""
        self.tabs.active = f"{TABS[number - 1]}-tab"

    def action_turn(self, by: int) -> None:
        """Go to the next tab, or the one before."""
        active = self.tabs.active.removesuffix("-tab")
        self.action_tab((TABS.index(active) + by) % len(TABS) + 1)

    def action_interrupt(self) -> None:
        """Exit with the code of an interrupted command. A run that shows this view then stops."""
        self.exit(return_code=INTERRUPTED)

    def action_hold(self) -> None:
        """Pause or resume the display."""
        self.held = not self.held
        self.query_one("#held", Static).display = self.held
        self.render_everything()

    def action_follow(self) -> None:
        """Let the list of trajectories follow the newest again."""
        self.listing.follow()
        self.render_everything()

    def action_help(self) -> None:
        """Show the help."""
        self.push_screen(Help())
