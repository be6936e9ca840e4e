import asyncio
import json
from pathlib import Path

import pytest

from streamrl.bus.history import BusHistory
from streamrl.bus.memory import MemoryBus
from streamrl.inspection.export import Exporter
from streamrl.inspection.lengths import recorded_completions
from streamrl.producers.lengths.learned import role_commands
from streamrl.producers.lengths.learned.model import load_newest
from streamrl.producers.lengths.learned.role_fitting import REPORT, fit_lengths
from streamrl.schemas.errors import DataError, UserError
from streamrl.schemas.topics import TRAJECTORIES
from streamrl.schemas.trajectories import FinishReason
from tests.fakes.topics import create_topics
from tests.producers.dispatch.dispatcher_harness import DispatcherHarness, order, trajectory
from tests.producers.lengths.learned.tiny import save_tiny


async def _export(to: Path, groups: int) -> Path:
    """Groups of two whose length grows with the number in the prompt; one repeat, one aborted."""
    bus = create_topics(MemoryBus(), "r")
    harness = DispatcherHarness(bus=bus)
    for position in range(groups):
        of = order(f"toy/{position}/0")
        prompt = of.prompt.model_copy(update={"content": f"Count {position % 40} sheep."})
        of = of.replace(prompt=prompt)
        for sample in range(2):
            record = trajectory(of, sample, length=10 + 5 * (position % 40) + sample)
            await harness.send(TRAJECTORIES, record, of.group_id, position % 3)
    await harness.send(TRAJECTORIES, trajectory(order("toy/0/0"), 0), "toy/0/0", 0)
    await harness.send(TRAJECTORIES, trajectory(order("toy/999/0"), 0, reason=FinishReason.ABORT), "x", 0)
    await Exporter(BusHistory(bus), "r", Path("config.toml"), to, "jsonl").export([TRAJECTORIES], [])
    return to


def test_each_completion_of_an_export_is_read_once(tmp_path: Path) -> None:
    export = asyncio.run(_export(tmp_path / "export", 20))
    completions = recorded_completions([export, export], lambda line: None)
    assert len(completions) == 40
    assert {one.prompt.dataset for one in completions} == {"toy"}


def test_trees_are_fitted_from_an_export_and_their_figures_stored_with_them(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    export = asyncio.run(_export(tmp_path / "export", 300))
    assert fit_lengths([export], tmp_path / "models", None, 0.9, 0.2, 1.0) == 0
    newest = load_newest(tmp_path / "models")
    assert newest is not None
    assert newest[0].version == 1
    held_out = json.loads((tmp_path / "models" / REPORT).read_text())["held_out"]
    assert set(held_out) == {"constant", "per_dataset", "learned"}
    assert held_out["learned"]["all"]["recall_20"] > 0.8 > held_out["constant"]["all"]["recall_20"]
    assert "recall @5%" in " ".join(capsys.readouterr().out.replace("│", " ").split())


def test_a_language_model_is_fitted_from_an_export(tmp_path: Path) -> None:
    export = asyncio.run(_export(tmp_path / "export", 60))
    assert fit_lengths([export], tmp_path / "models", save_tiny(tmp_path / "base"), 0.9, 0.2, 1.0) == 0
    assert (tmp_path / "models" / "language-00000001" / "manifest.json").exists()


def test_what_cannot_be_fitted_ends_with_a_line_for_the_user(tmp_path: Path) -> None:
    export = asyncio.run(_export(tmp_path / "export", 10))
    with pytest.raises(DataError, match="completions"):
        fit_lengths([export], tmp_path / "models", None, 0.9, 0.2, 1.0)
    with pytest.raises(UserError, match="run's directory"):
        fit_lengths([tmp_path / "nowhere"], tmp_path / "models", None, 0.9, 0.2, 1.0)
    big = asyncio.run(_export(tmp_path / "more", 60))
    (tmp_path / "file").write_text("")
    with pytest.raises(UserError, match="writable"):
        fit_lengths([big], tmp_path / "file", None, 0.9, 0.2, 1.0)


def test_a_ranker_is_fitted_from_trees_or_a_language_model_and_not_both(tmp_path: Path) -> None:
    for model, light in ((None, False), (tmp_path, True)):
        with pytest.raises(UserError, match="expected either --light or --model DIR"):
            role_commands.fit([tmp_path], tmp_path / "models", model, light=light)
