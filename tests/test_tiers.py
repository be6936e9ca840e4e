"""Each test has one tier, and a unit test starts neither a broker nor any other process."""

import re
import subprocess
import sys
from pathlib import Path

import pytest

from tests import suite
from tests.tiers import TIERS, asked_for, starts, tier_of

PLUGINS = ("-p", "tests.tiers", "-p", "tests.broker_fixture", "-p", "no:cacheprovider")
STARTING = """
import multiprocessing, os, subprocess, threading
import pytest

def test_a_broker(bootstrap_servers): pass
def test_b_broker_later(request): request.getfixturevalue("bootstrap_servers")
def test_c_subprocess(): subprocess.run(["true"])
def test_d_fork(): os.fork()
def test_e_multiprocessing(): multiprocessing.get_context("spawn").Process(target=print).start()
def test_f_nothing(): pass

def test_g_thread():
    thread = threading.Thread(target=test_c_subprocess)
    thread.start()
    thread.join()

async def test_h_asyncio():
    import asyncio
    with pytest.raises(OSError):
        await asyncio.create_subprocess_exec("true")
"""


@pytest.mark.parametrize(
    ("marks", "fixtures", "tier"),
    [
        (set(), set(), "unit"),
        ({"asyncio", "timeout"}, {"tmp_path"}, "unit"),
        (set(), {"tmp_path", "bootstrap_servers"}, "integration"),
        ({"processes"}, set(), "integration"),
        ({"vllm"}, set(), "integration"),
        ({"vllm", "long"}, set(), "long"),
        ({"compose"}, set(), "long"),
        ({"processes", "long"}, {"bootstrap_servers"}, "long"),
    ],
)
def test_marks_and_fixtures_decide_the_tier(marks: set[str], fixtures: set[str], tier: str) -> None:
    assert tier_of(marks, fixtures) == tier


def test_each_test_of_the_session_is_of_one_tier(request: pytest.FixtureRequest) -> None:
    for item in request.session.items:
        assert len({mark.name for mark in item.iter_markers()} & set(TIERS)) == 1, item.nodeid


def test_a_fixture_that_is_asked_for_at_run_time_counts(request: pytest.FixtureRequest) -> None:
    assert "tmp_path" not in asked_for(request.node)
    request.getfixturevalue("tmp_path")
    assert "tmp_path" in asked_for(request.node)


def test_a_unit_test_is_refused_a_broker() -> None:
    with pytest.raises(OSError, match=r"expected a unit test .* the start of a broker: mark it with"):
        starts.expect_allowed("a broker")
    starts.refused.clear()


@pytest.mark.processes
def test_unit_tests_start_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PYTHONPATH", str(suite.ROOT))
    (tmp_path / "test_module.py").write_text(STARTING)
    (tmp_path / "pytest.ini").write_text("[pytest]\nasyncio_mode = auto\nmarkers =\n  unit\n  integration\n  long\n")
    command = [sys.executable, "-m", "pytest", *PLUGINS, "-q", "-rA", "-m", "unit", f"--rootdir={tmp_path}"]
    said = subprocess.run([*command, str(tmp_path)], capture_output=True, text=True, cwd=tmp_path).stdout
    assert "1 deselected" in said
    assert set(re.findall(r"^ERROR .*::(test_\w+)", said, re.M)) == {
        "test_b_broker_later",
        "test_c_subprocess",
        "test_d_fork",
        "test_e_multiprocessing",
        "test_g_thread",
        "test_h_asyncio",
    }
