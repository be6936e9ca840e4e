"""A finding of the check-up: what was looked at, what was found, and how to mend it. Pure."""

from collections.abc import Iterable, Iterator
from dataclasses import asdict, dataclass
from typing import Literal

Level = Literal["ok", "warn", "fail"]
SOMETHING_FAILS = 2


@dataclass(frozen=True)
class Finding:
    """``mend`` says what to do; it is empty only if nothing is to be done."""

    level: Level
    check: str
    detail: str
    mend: str = ""

    @property
    def line(self) -> str:
        """In one line, or two."""
        mend = f"\n{'':16}→ {self.mend}" if self.mend else ""
        return f"{self.level:<5}{self.check:<11}{self.detail}{mend}"


def ok(check: str, detail: str) -> Finding:
    """All is well."""
    return Finding("ok", check, detail)


def warn(check: str, detail: str, mend: str) -> Finding:
    """It works, but not as it should."""
    return Finding("warn", check, detail, mend)


def fail(check: str, detail: str, mend: str) -> Finding:
    """A run cannot work like this."""
    return Finding("fail", check, detail, mend)


def exit_code(findings: Iterable[Finding]) -> int:
    """0, or 2 if something fails."""
    return SOMETHING_FAILS if any(each.level == "fail" for each in findings) else 0


def as_rows(findings: Iterable[Finding]) -> list[dict[str, str]]:
    """For JSON."""
    return [asdict(each) for each in findings]


def verdict(findings: Iterable[Finding]) -> Iterator[str]:
    """The last line."""
    levels = [each.level for each in findings]
    yield f"{levels.count('ok')} ok, {levels.count('warn')} to look at, {levels.count('fail')} to mend"
