"""The checklist of a dry run: lines with a result each, reported as soon as they are known."""

import asyncio
from collections.abc import Callable, Coroutine, Sequence
from dataclasses import dataclass
from typing import Any, Literal, TypeVar

from streamrl.schemas.errors import StreamRLError


@dataclass(frozen=True)
class Check:
    """One line of the checklist. ``note``: worth knowing, but the run can start."""

    subject: str
    state: Literal["ok", "note", "fail"]
    detail: str

    def __str__(self) -> str:
        mark = "FAIL" if self.state == "fail" else self.state
        return f"{mark:<5} {self.subject:<12} {' '.join(self.detail.split())}"


Report = Callable[[str], None]
Result = TypeVar("Result")
CheckResult = Check | Sequence[Check]
CheckFunction = Callable[[], CheckResult | Coroutine[Any, Any, Sequence[Check]]]


class Checklist:
    """Runs checks and reports each line at once; a check that raises becomes a failed line, and the others continue."""

    def __init__(self, report: Report) -> None:
        self._report = report
        self.checks: list[Check] = []

    def add(self, *checks: Check) -> None:
        """Report lines."""
        self.checks += checks
        for check in checks:
            self._report(str(check))

    def show(self, line: str) -> None:
        """Report a line that is not a check."""
        self._report(f"      {line}")

    def attempt(self, subject: str, check: Callable[[], Result]) -> Result | None:
        """The result of ``check``; None if it raised, after a line with the error."""
        try:
            return check()
        except StreamRLError as error:  # its text explains itself; other errors need the name of their class
            self.add(Check(subject, "fail", str(error)))
        except Exception as error:
            self.add(Check(subject, "fail", f"{type(error).__name__}: {error}"))
        return None

    def run(self, subject: str, check: CheckFunction) -> None:
        """Run a check, which may be asynchronous, and report its lines."""

        def run_check() -> CheckResult:
            result = check()
            # Each check gets its own event loop, which cancels tasks that a failed check leaves behind.
            return asyncio.run(result) if isinstance(result, Coroutine) else result

        result = self.attempt(subject, run_check)
        if result is not None:
            self.add(*([result] if isinstance(result, Check) else result))


def closing_line(checks: Sequence[Check]) -> str:
    """The last line: the number of checks by result, with the subjects of notes and failures."""
    by_state = {state: [check.subject for check in checks if check.state == state] for state in ("ok", "note", "fail")}
    parts = [f"{len(by_state['ok'])} ok"]
    if notes := by_state["note"]:
        parts.append(f"{len(notes)} note{'s' * (len(notes) > 1)} ({_distinct(notes)})")
    if failed := by_state["fail"]:
        parts.append(f"{len(failed)} failed ({_distinct(failed)})")
    return f"{len(checks)} checks: {', '.join(parts)}; nothing was started"


def _distinct(subjects: Sequence[str]) -> str:
    return ", ".join(dict.fromkeys(subjects))
