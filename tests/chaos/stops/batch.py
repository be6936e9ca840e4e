"""`python -m tests.chaos.stops.batch ROLE FIRST COUNT`: moments in forks of a process, which may crash; a line of JSON
for each.
"""

import faulthandler
import json
import os
import signal
import sys
import time
import traceback
from collections.abc import Iterator
from contextlib import redirect_stdout
from dataclasses import asdict
from typing import Any

from tests.chaos.stops.moment import END_S, Moment, Role, live_through
from tests.chaos.stops.roles import find_role

STUCK_S = 6 * END_S


def moments(role: Role, first: int, count: int) -> Iterator[Moment]:
    """All of them in order. A fork that dies of a signal costs the moment that it was at; the next one goes on."""
    at = first
    while at < first + count:
        reading, writing = os.pipe()
        if (child := os.fork()) == 0:
            os.close(reading)
            _in_fork(role, at, first + count, writing)
        os.close(writing)
        with os.fdopen(reading) as lines:
            for line in lines:
                yield Moment(**json.loads(line))
                at += 1
        _, status = os.waitpid(child, 0)
        if code := os.waitstatus_to_exitcode(status):
            died = f"died of {signal.Signals(-code).name}" if code < 0 else f"ended with {code}"
            yield Moment(at, "?", 0.0, [f"its process {died}"])
            at += 1


def _in_fork(role: Role, first: int, end: int, writing: int) -> Any:
    code = 1
    os.dup2(2, 1)  # what roles print is none of our lines
    try:
        with os.fdopen(writing, "w") as to:
            for seed in range(first, end):
                faulthandler.dump_traceback_later(STUCK_S, exit=True)
                moment = live_through(role, seed)
                faulthandler.cancel_dump_traceback_later()
                print(json.dumps(asdict(moment)), file=to, flush=True)
        code = 0
    except BaseException:
        traceback.print_exc()
    finally:
        sys.stderr.flush()
        os._exit(code)


def main() -> int:
    faulthandler.enable()
    name, first, count = sys.argv[1], int(sys.argv[2]), int(sys.argv[3])
    role = find_role(name)
    with redirect_stdout(sys.stderr):
        live_through(role, 0)  # imports, and what is opened once in a process
    began = time.monotonic()
    for moment in moments(role, first, count):
        print(json.dumps(asdict(moment)), flush=True)
    print(json.dumps({"seconds": round(time.monotonic() - began, 1)}), flush=True)
    return 0


if __name__ == "__main__":
    sys.exit(main())
