import io
import logging
import os
import subprocess
import sys
from collections.abc import Iterator
from contextlib import redirect_stdout
from pathlib import Path

import pytest
import structlog

from streamrl.deploy.wiring.process import configure_logging
from streamrl.inspection.process import log_to_stderr
from streamrl.observability.log_lines import LibraryLines

HOSTILE = "a\x1b]0;owned\x07\x9b2J\u202e\r\nb"


@pytest.fixture(autouse=True)
def _logging_as_it_was() -> Iterator[None]:
    yield
    structlog.reset_defaults()


def test_printed_text_cannot_control_the_terminal() -> None:
    output = io.StringIO()
    with redirect_stdout(output):
        configure_logging({"process": "worker"})
        log = structlog.get_logger()
        log.info(HOSTILE, trajectory=HOSTILE, error=ValueError(HOSTILE), count=3, ratio=0.5, nothing=None, well=True)
        try:
            raise ValueError(HOSTILE)
        except ValueError:
            log.exception("it failed")
    lines = output.getvalue().splitlines()
    assert len(lines) == 2
    assert all(line.isprintable() for line in lines)
    assert "count=3 ratio=0.5" in lines[0] or ("count=3" in lines[0] and "ratio=0.5" in lines[0])
    assert "Traceback" in lines[1]


def test_a_copy_gets_every_line_and_may_be_cut_meanwhile(tmp_path: Path) -> None:
    copy, output = tmp_path / "logs" / "worker.log", io.StringIO()
    with redirect_stdout(output):
        configure_logging({"process": "worker"}, copy=copy)
        structlog.get_logger().info("first")
        assert copy.read_text() == output.getvalue()
        os.truncate(copy, 0)
        structlog.get_logger().info("second")
    assert [line.split("event=")[1].split()[0] for line in output.getvalue().splitlines()] == ["first", "second"]
    assert copy.read_text() == output.getvalue().splitlines(keepends=True)[1]


def test_a_commands_log_holds_nothing_that_a_terminal_obeys(capsys: pytest.CaptureFixture[str]) -> None:
    log_to_stderr()
    structlog.get_logger().warning("odd", what=HOSTILE)
    (line,) = capsys.readouterr().err.splitlines()
    assert line.isprintable()


def test_a_library_cannot_flood() -> None:
    output, now = io.StringIO(), [0.0]
    library = logging.getLogger("a.library")
    handler = LibraryLines(every_s=10, clock=lambda: now[0])
    library.addHandler(handler)
    library.propagate = False
    try:
        with redirect_stdout(output):
            configure_logging({"run": "r"})
            for second in range(25):
                now[0] = float(second)
                for number in range(100):
                    library.error("Unable connect to node %s: %s", number, HOSTILE)
                library.warning("another place, %s", second)
    finally:
        library.removeHandler(handler)
    lines = [line for line in output.getvalue().splitlines() if "Unable connect" in line]
    assert len(lines) == 3, "seconds 0, 10 and 20"
    assert all(line.startswith("timestamp=") and "level=error" in line and "run=r" in line for line in lines)
    assert all("logger=a.library" in line and line.isprintable() for line in lines)
    assert "repeated=999" in lines[1]
    assert len([line for line in output.getvalue().splitlines() if "another place" in line]) == 3


FULL = """
import sys
sys.stdout = open("/dev/full", "w")
import logging, structlog
from streamrl.deploy.wiring.process import configure_logging
from streamrl.observability.log_lines import forget_unwritten
configure_logging({"process": "trainer"})
structlog.get_logger().info("step", step=1)
logging.getLogger("aiokafka").error("refused")
structlog.get_logger().info("step", step=2)
forget_unwritten()
sys.stderr.write("it went on")
"""


@pytest.mark.processes
def test_a_full_disk_costs_lines_only() -> None:
    done = subprocess.run([sys.executable, "-c", FULL], capture_output=True, text=True, check=False)
    assert (done.returncode, done.stderr) == (0, "it went on")
