"""What `streamrl dlq` does: opens the run, reads or sends, prints, and ends with a code."""

import json
import re
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Callable, Collection, Coroutine
from datetime import datetime
from pathlib import Path
from typing import Any, TypeVar

import uvloop
from rich.console import Console

from deploy.inspection.bus_history import BusHistory
from deploy.inspection.letters.letters import Letter, read_letter, read_letters
from deploy.inspection.letters.retrying import Action, plan_retries, send_retries
from deploy.inspection.letters.view import as_json, lines_of, retry_lines, table_of
from deploy.inspection.source import broker_of, history_of, open_run
from schemas.errors import UserError
from schemas.ports.history import History

SOME_REFUSED = 1
WIDTH = 160
_AGO = re.compile(r"(\d+(?:\.\d+)?)\s*([smhd])")
_SECONDS = {"s": 1, "m": 60, "h": 3600, "d": 86_400}
T = TypeVar("T")


def list_letters(
    run: Path, export: Path | None, error_class: str | None, since: str | None, *, json_lines: bool
) -> int:
    """Print the letters that pass the filters; the exit code.

    Raises:
        UserError: no such run, or a time that cannot be read.
    """
    after = 0.0 if since is None else moment(since, time.time())

    async def read(history: History, name: str) -> list[Letter]:
        return [letter async for letter in read_letters(history, name) if wanted(letter)]

    def wanted(letter: Letter) -> bool:
        return letter.record.timestamp >= after and error_class in (None, letter.error_class)

    letters = _with_history(run, export, read)
    if json_lines:
        for letter in letters:
            print(json.dumps(as_json(letter)))
        return 0
    if letters:
        Console(width=None if sys.stdout.isatty() else WIDTH, markup=False, highlight=False).print(table_of(letters))
    print(f"{len(letters)} dead letters")
    return 0


def show_letter(run: Path, export: Path | None, offset: int) -> int:
    """Print one letter in full; the exit code.

    Raises:
        UserError: there is no such letter.
    """

    async def read(history: History, name: str) -> Letter | None:
        return await read_letter(history, name, offset)

    letter = _with_history(run, export, read)
    if letter is None:
        raise UserError(f"expected a dead letter at offset {offset}, found none; `streamrl dlq ls` lists them")
    print("\n".join(lines_of(letter)))
    return 0


def retry_letters(run: Path, offsets: Collection[int], *, everything: bool, dry_run: bool, force: bool) -> int:
    """Send letters once more; the exit code is 1 if some were refused.

    Raises:
        UserError: neither offsets nor ``everything``, or an offset without a letter.
    """
    if bool(offsets) == everything:
        raise UserError("expected either offsets of dead letters or --all; `streamrl dlq ls` lists them")
    return _write(run, None if everything else offsets, dry_run=dry_run, force=force)


def _write(run: Path, offsets: Collection[int] | None, *, dry_run: bool, force: bool) -> int:
    from deploy.bus.kafka_bus import KafkaBus

    past = open_run(run)
    with broker_of(past, None, _tell) as address:
        bus = KafkaBus(past.settings.kafka.model_copy(update={"bootstrap_servers": address}))
        plan, missing = uvloop.run(plan_retries(BusHistory(bus, "dlq"), past.name, offsets, force=force))
        if missing:
            raise UserError(f"expected dead letters at {', '.join(map(str, missing))}, found none; nothing was sent")
        outcomes = plan if dry_run else uvloop.run(send_retries(bus, plan))
    for line in retry_lines(outcomes):
        print(line)
    counts = Counter(outcome.action for outcome in outcomes)
    print(", ".join(f"{count} {action.value}" for action, count in counts.items()) or "no dead letters")
    return SOME_REFUSED if counts[Action.REFUSED] else 0


def moment(text: str, now: float) -> float:
    """A time such as ``30m``, ``2h``, ``1d`` ago, or an ISO date and time, in seconds since the epoch.

    Raises:
        UserError: it is neither.
    """
    if (match := _AGO.fullmatch(text.strip())) is not None:
        return now - float(match[1]) * _SECONDS[match[2]]
    try:
        return datetime.fromisoformat(text.strip()).timestamp()
    except ValueError as error:
        raise UserError(f"expected a time such as '2h', '30m' or '2026-01-31T12:00', got {text!r}") from error


def _with_history(run: Path, export: Path | None, read: Callable[[History, str], Coroutine[Any, Any, T]]) -> T:
    past = open_run(run)
    with (
        tempfile.TemporaryDirectory(prefix="streamrl-dlq-") as scratch,
        history_of(past, export, Path(scratch), _tell) as history,
    ):
        return uvloop.run(read(history, past.name))


def _tell(line: str) -> None:
    print(line, file=sys.stderr)
