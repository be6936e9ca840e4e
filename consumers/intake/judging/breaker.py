"""Stops the trainer when so much input is bad that the fault must lie elsewhere. Pure."""

from collections import deque
from dataclasses import dataclass, field

from schemas.errors import BadInput

WINDOW = 1000
MIN_SEEN = 100


@dataclass
class CircuitBreaker:
    """Trips at too many bad records in a row, or too large a share of the last 1000, judged from 100 records on."""

    fault: str
    max_consecutive: int
    max_share: float
    consecutive: int = 0
    bad: int = 0
    recent: deque[bool] = field(default_factory=lambda: deque(maxlen=WINDOW))

    def good(self) -> None:
        """Note a record without this fault."""
        self._note(is_bad=False)
        self.consecutive = 0

    def failed(self, detail: str) -> None:
        """Note a record with this fault.

        Raises:
            BadInput: there are too many of them.
        """
        self._note(is_bad=True)
        self.consecutive += 1
        seen = len(self.recent)
        if self.consecutive > self.max_consecutive or (seen >= MIN_SEEN and self.bad / seen > self.max_share):
            raise BadInput(
                f"expected few {self.fault}, got {self.consecutive} in a row and {self.bad} among the last {seen}, "
                f"the latest: {detail}; mend what writes them, or raise the limits in [intake]"
            )

    def _note(self, *, is_bad: bool) -> None:
        if len(self.recent) == WINDOW:
            self.bad -= self.recent[0]
        self.recent.append(is_bad)
        self.bad += is_bad
