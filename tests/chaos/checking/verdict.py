"""What our checker and `streamrl audit` say of a run whose processes have ended."""

from dataclasses import dataclass

from tests.chaos.checking.audited import audit_problems
from tests.chaos.checking.books import Books, read_books
from tests.chaos.checking.checker import Findings, check
from tests.chaos.checking.checkpoints import newest_checkpoint
from tests.chaos.runs.setting import Setting


@dataclass(frozen=True)
class Verdict:
    """``problems``: of both."""

    books: Books
    findings: Findings
    problems: list[str]


async def judge(setting: Setting, address: str, last_step: int | None = None) -> Verdict:
    """Read the run's topics and newest checkpoint; ``last_step``: that it must have come to."""
    books = await read_books(address, setting.name)
    findings = check(books, newest_checkpoint(setting), setting.settings.loop.groups_per_step, last_step)
    audited = [f"audit: {line}" for line in await audit_problems(setting, address, findings)]
    return Verdict(books, findings, [*findings.problems, *audited])
