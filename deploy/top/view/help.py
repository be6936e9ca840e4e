"""What the keys do and what the panels mean, over the screen until a key is pressed."""

from rich.text import Text
from textual import events
from textual.app import ComposeResult
from textual.screen import ModalScreen
from textual.widgets import Static

from deploy.top.drawing.blocks import ACCENT, MUTED

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
    ("lag", "trajectories that the trainer has not finished"),
    ("unread", "those of them that it has not fetched yet"),
    ("staleness", "steps between the oldest token's weights and those improved"),
    ("−2", "a worker is two weight versions behind"),
    ("busy", "share of the last minute that was not waiting"),
)


class Help(ModalScreen[None]):
    """Any key closes it."""

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
        event.stop()
        self.dismiss()
