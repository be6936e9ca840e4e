"""One line of the checklist."""

from dataclasses import dataclass
from typing import Literal


@dataclass(frozen=True)
class Check:
    """``note``: worth knowing, and no reason not to start."""

    subject: str
    state: Literal["ok", "note", "fail"]
    detail: str

    def __str__(self) -> str:
        mark = "FAIL" if self.state == "fail" else self.state
        return f"{mark:<5} {self.subject:<12} {' '.join(self.detail.split())}"
