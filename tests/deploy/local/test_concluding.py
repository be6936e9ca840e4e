"""The end of a run whose topics, audit or files fail: a warning, or one line that says what to do."""

import errno
import os
from pathlib import Path
from typing import Any

import pytest
from structlog.testing import capture_logs

from streamrl.deploy.local import concluding
from streamrl.deploy.local.concluding import TrainingOutcome, audited, conclude, gathered_topics
from streamrl.observability.run_state.state import RunState
from streamrl.schemas.errors import BusUnavailable, UserError
from streamrl.settings.loading import load_settings
from streamrl.settings.run_directory import RunDirectory

SETTINGS = load_settings(None, ["--data.dataset=chain_sum", "--model.path=m", "--run.name=my-run"])


@pytest.mark.parametrize(
    ("name", "close", "hint"),
    [
        ("gather_topics", gathered_topics, "streamrl report --run runs/my-run --from-topics"),
        ("closing_report", audited, "streamrl audit --run runs/my-run"),
    ],
)
async def test_a_broker_that_fails_at_the_end_is_a_warning_with_the_command_for_later(
    name: str, close: Any, hint: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    async def fail(*_arguments: object) -> None:
        raise BusUnavailable("no answer from the broker")

    monkeypatch.setattr(concluding, name, fail)
    monkeypatch.setattr(concluding, "BusHistory", lambda *_arguments, **_options: None)
    with capture_logs() as logs:
        assert await close(None, SETTINGS, RunDirectory(Path("runs/my-run"))) is None
    (line,) = logs
    assert hint in line["event"]
    assert (line["log_level"], line["error"]) == ("warning", "no answer from the broker")


def test_a_full_disk_at_the_end_says_that_no_step_is_lost(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def full(*_arguments: object) -> None:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    monkeypatch.setattr(concluding, "write_summary", full)
    outcome = TrainingOutcome(RunState("my-run"), None, 1.0, {}, finished=True)
    with pytest.raises(UserError, match=r"^expected to write summary .*: No space left on device; free space there"):
        conclude(SETTINGS, RunDirectory(tmp_path), outcome, 0, None, None)
