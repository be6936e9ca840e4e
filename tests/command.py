"""A command within the test's own process: it says and ends as a process of its own, without the second a start takes.

For commands that are over by themselves. Where signals, a terminal or what is inherited matter, tests start processes.
An audit keeps the priority of the tests: at its own, beside a busy machine, it would take minutes.
"""

import io
import logging
import os
from contextlib import redirect_stderr, redirect_stdout
from dataclasses import dataclass
from unittest import mock

import structlog

from streamrl.cli import app


@dataclass(frozen=True)
class Ended:
    """As ``subprocess`` tells it."""

    returncode: int
    stdout: str
    stderr: str
    niceness: int | None = None
    """That it asked for; none: it asked for none."""


def ended(*arguments: str) -> Ended:
    """Carry out ``streamrl`` with these arguments. Environment, logs and loggers are afterwards as they were before."""
    out, err = io.StringIO(), io.StringIO()
    loggers, logs = [logging.getLogger(name) for name in (None, "aiokafka")], structlog.get_config()
    levels = [logger.level for logger in loggers]
    at_this_priority = mock.patch("streamrl.cli.inspect.lower_priority")
    try:
        with (
            mock.patch("sys.argv", ["streamrl", *arguments]),
            mock.patch.dict(os.environ),
            at_this_priority as asked,
            redirect_stdout(out),
            redirect_stderr(err),
        ):
            app.main()
        code = 0
    except SystemExit as end:
        code = int(end.code or 0)
    finally:
        for logger, level in zip(loggers, levels, strict=True):
            logger.setLevel(level)
        structlog.configure(**logs)
    niceness = asked.call_args.args[0] if asked.called else None
    return Ended(code, out.getvalue(), err.getvalue(), niceness)
