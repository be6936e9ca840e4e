"""The Textual application: tabs of panels over a live state, drawn at the pace that is given, or when a key asks.

Invariants, each with a test of its name:
- only_what_is_in_sight_is_drawn: sections that no visible panel needs are not even put together;
- what_did_not_change_is_not_drawn_again.
"""

import time
from collections.abc import Callable
from pathlib import Path
from typing import Any, ClassVar

from textual.app import App, ComposeResult
from textual.binding import Binding, BindingType
from textual.containers import Grid, Horizontal, Vertical
from textual.theme import Theme
from textual.widgets import Footer, OptionList, Static, TabbedContent, TabPane

from deploy.live.pace import OFTEN_S
from deploy.live.snapshot import SECTIONS
from deploy.live.state import LiveState
from deploy.top.drawing.blocks import ACCENT
from deploy.top.view.help import Help
from deploy.top.view.panels import BOARD, CURVES, EVENTS, HEAD, LAG, LENGTHS, LOOP, SPLIT, STALENESS, WORKERS, Panel
from deploy.top.view.trajectories import Read, Trajectories

INTERRUPTED = 130
SLOW = {"curves": 2, "lengths": 2, "staleness": 2, "split": 2}
"""Sections that are looked at every so many ticks."""
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
    HORIZONTAL_BREAKPOINTS = [(0, "-narrow"), (120, "-wide")]
    VERTICAL_BREAKPOINTS = [(0, "-low"), (40, "-high")]
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
        state: LiveState,
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
        self.head = Panel(HEAD, "head", classes="")
        self.tabs = TabbedContent(id="tabs")
        self.listing = Trajectories(read, run_path)
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
        self.call_after_refresh(self.look_again)

    def look_again(self) -> None:
        """Look, and once more when it is time."""
        self.look()
        self.set_timer(self.pace_s(), self.look_again)

    def look(self) -> None:
        """Draw what has changed since, of what is in sight."""
        if self.held or not self.head.is_attached or (pane := self.tabs.active_pane) is None:
            return
        now = self.state.moment(self.clock())
        self.state.tick(now)
        panels = [panel for panel in (self.head, *pane.query(Panel)) if panel.display]
        listing = pane.id == "trajectories-tab"
        needed = {name for panel in panels for name in panel.drawing.needs} | ({"trajectories"} if listing else set())
        for name in needed:
            if name not in self.sections or not self.ticks % SLOW.get(name, 1):
                self.sections[name] = SECTIONS[name](self.state, now)
        for panel in panels:
            panel.show(self.sections)
        if listing:
            self.listing.show(self.sections["trajectories"])
        self.ticks += 1

    def look_anew(self) -> None:
        """Draw at once, whatever is due."""
        self.ticks = 0
        self.look()

    def on_tabbed_content_tab_activated(self, event: TabbedContent.TabActivated) -> None:
        """What was out of sight is old, and has a size only when the tab has been laid out."""
        if event.pane.id == "trajectories-tab":
            self.query_one("#list", OptionList).focus()
        self.call_after_refresh(self.look_anew)

    def on_resize(self) -> None:
        """Other panels may be in sight now."""
        self.call_after_refresh(self.look_anew)

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
        self.look_anew()

    def action_follow(self) -> None:
        """Let the list of trajectories go on."""
        self.listing.follow()
        self.look_anew()

    def action_help(self) -> None:
        """Explain."""
        self.push_screen(Help())
