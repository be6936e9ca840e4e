"""The trajectories' tab: the newest ones as a list that can be held still, and one of them in detail."""

from collections.abc import Awaitable, Callable, Mapping, Sequence
from typing import Any

from rich.text import Text
from textual.app import ComposeResult
from textual.containers import Container, VerticalScroll
from textual.widgets import OptionList, Static
from textual.widgets.option_list import Option

from deploy.top.drawing.blocks import BAD, plain
from deploy.top.drawing.records import head_of_rows, preview, row_of, whole
from schemas.errors import StreamRLError
from schemas.messages.trajectories import Trajectory

Read = Callable[[str], Awaitable[Trajectory]]
"""Reads the record at ``partition@offset``; raises an error of ours if it is gone or the broker does not answer."""
Row = Mapping[str, Any]


class Trajectories(Container):
    """Follows the newest until another row is chosen; then the list stands still."""

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
        if self.held or width < 1 or (list(rows) == self.rows and width == self.width):
            return
        self.rows, self.width = list(rows), width
        self.query_one("#columns", Static).update(head_of_rows(width))
        listed.clear_options()
        listed.add_options([Option(row_of(row, width)) for row in self.rows])
        if self.rows:
            listed.highlighted = 0

    def follow(self) -> None:
        """Let the list go on."""
        self.held, self.opened = False, ""
        self._title()

    def on_option_list_option_highlighted(self, event: OptionList.OptionHighlighted) -> None:
        """Show what is known at once; any row but the newest holds the list."""
        if event.option_index >= len(self.rows):
            return
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
        self.run_worker(self._open(row), exclusive=True)

    async def _open(self, row: Row) -> None:
        command = f"streamrl show {row['id']} {self.run_path}"
        try:
            told = whole(await self.read(row["place"]), row["place"], row["fate"], command)
        except StreamRLError as error:
            told = preview(row).append(f"\n{plain(str(error))}", BAD)
        if self.opened == row["place"]:
            self._tell(told)

    def _tell(self, text: Text) -> None:
        self.query_one("#told", Static).update(text)
        self.query_one("#detail", VerticalScroll).scroll_home(animate=False)

    def _title(self) -> None:
        self.query_one("#listed", Container).border_title = (
            "last trajectories, held (f follows again)" if self.held else "last trajectories"
        )
