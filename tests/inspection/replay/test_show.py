import io
import json
from pathlib import Path

import numpy as np
import pytest
from rich.console import Console

from streamrl.inspection.replay.events import HistoryEvent
from streamrl.inspection.replay.history import TrajectoryHistory, TrajectoryRecord
from streamrl.inspection.replay.show import history_text, pieces_of, show
from streamrl.schemas.errors import UserError
from streamrl.schemas.identifiers import PolicyVersion
from streamrl.schemas.trajectories import VersionSpan
from tests.consumers.training.factories import make_trajectory
from tests.inspection.replay.conftest import CULPRIT, RecordedRunFiles


def sample_history() -> TrajectoryHistory:
    spans = (
        VersionSpan(version=PolicyVersion(1, 3), start=0, end=1),
        VersionSpan(version=PolicyVersion(1, 4), start=1, end=4),
    )
    mask = np.array([1, 0, 1, 1], dtype="<u1")
    trajectory = make_trajectory().replace(version_spans=spans, loss_mask=mask, reward_errors={"style": "timed out"})
    return TrajectoryHistory(
        trajectory,
        (TrajectoryRecord(0, 7, 2.0, "pending"),),
        (HistoryEvent(1.0, "started", "w", None), HistoryEvent(2.5, "x", "y", 1.5)),
    )


def printed(*, terminal: bool) -> str:
    out = io.StringIO()
    console = Console(file=out, force_terminal=terminal, color_system="standard" if terminal else None, soft_wrap=True)
    console.print(history_text(sample_history(), lambda token_id: f"t{token_id}"))
    return out.getvalue()


def test_tokens_stand_under_the_version_that_sampled_them_even_without_colours() -> None:
    text = printed(terminal=False)
    assert "versions: 1-3 1-4 (not trained)" in text
    assert "  [1-3]  't4' -3.00\n" in text
    assert "  [1-4]  ('t5' -3.00)  't6' -3.00  't7' -3.00\n" in text
    assert "\x1b" not in text
    assert "style failed: timed out" in text
    assert "0@7: pending" in text
    assert "+1.500 s" in text


def test_on_a_terminal_each_version_has_its_colour() -> None:
    text = printed(terminal=True)
    assert "\x1b[36m't4'" in text
    assert "\x1b[33m't6'" in text


def test_a_model_without_a_tokenizer_shows_ids(tmp_path: Path) -> None:
    assert pieces_of(str(tmp_path))(17) == "#17"


def test_show_prints_a_history_from_an_export(
    recorded_run: RecordedRunFiles, capsys: pytest.CaptureFixture[str]
) -> None:
    show(CULPRIT, recorded_run.directory, recorded_run.export, json=False)
    text = capsys.readouterr().out
    assert "because" in text
    assert "trained in step 13" in text
    show(CULPRIT, recorded_run.directory, recorded_run.export, json=True)
    found = json.loads(capsys.readouterr().out)
    assert found["trajectory"]["trajectory_id"] == CULPRIT
    assert [event["what"] for event in found["events"]] == ["started", "finished", "appended", "trained", "reported"]
    group = CULPRIT.rpartition("/")[0]
    show(group, recorded_run.directory, recorded_run.export, json=False)
    text = capsys.readouterr().out
    assert text.startswith(f"{group}: ")
    assert sum(f"{group}/" in line and "trained in step 13" in line for line in text.splitlines()) > 1
    with pytest.raises(UserError, match="not there"):
        show("nobody", recorded_run.directory, recorded_run.export, json=False)
