import asyncio
import json
import re
import shutil
from itertools import takewhile
from pathlib import Path

import pytest

import streamrl
from streamrl.cli import app
from streamrl.inspection.export import USUAL, Exporter
from streamrl.inspection.report.command import names_of
from streamrl.inspection.report.record import RunFacts, read_facts, write_facts
from streamrl.schemas.errors import UserError
from tests.inspection.report.recorded import gather, record_run


@pytest.fixture(scope="module")
def recorded(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("recorded")
    for seed in (1, 2):
        asyncio.run(gather(record_run(folder / f"trial-{seed}", seed=seed, seconds=40.0)))
    return folder


@pytest.fixture
def runs(recorded: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Two recorded runs under runs/, and the directory above as the working one."""
    monkeypatch.chdir(tmp_path)
    shutil.copytree(recorded, tmp_path / "runs")
    return tmp_path


def ended(arguments: list[str], monkeypatch: pytest.MonkeyPatch) -> int:
    """The exit code of the report with options, after the runs that the words before them name."""
    runs = list(takewhile(lambda word: not word.startswith("--"), arguments))
    arguments = [*(f"--run={run}" for run in runs), *arguments[len(runs) :]]
    monkeypatch.setattr("sys.argv", ["streamrl", "report", *arguments])
    with pytest.raises(SystemExit) as caught:
        app.main()
    return int(caught.value.code or 0)


def test_a_run_gets_its_report_by_name_or_directory(
    runs: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    page = runs / "runs" / "trial-1" / "report.html"
    for given in ("trial-1", "runs/trial-1", "runs/trial-1/config.resolved.toml"):
        page.unlink(missing_ok=True)
        assert ended([given], monkeypatch) == 0
        assert capsys.readouterr().out == "report: runs/trial-1/report.html\n"
        assert "<title>trial-1 · StreamRL</title>" in page.read_text()


def test_several_runs_are_compared(
    runs: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    assert ended(["runs/trial-1", "runs/trial-2"], monkeypatch) == 0
    out = capsys.readouterr().out
    assert out.endswith("report: comparison.html\n")
    assert re.search(r"trial-1\s+trial-2", out)
    assert re.search(r"entropy, last steps \(nats a token\)\s+\S+\s+\S+", out)
    assert re.search(r"reward, second half: trial-2 \S+ against trial-1 on \d+ prompts, 95 % interval .* p ", out)
    page = (runs / "comparison.html").read_text()
    assert "loop.max_staleness" in page
    assert "trial-2: reward, second half" in page
    assert "algorithm.name</th>" not in page
    assert ended(["trial-1", "trial-2", "--out", "mine.html"], monkeypatch) == 0
    assert (runs / "mine.html").read_text() == page


def test_the_figures_are_had_as_json(
    runs: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    assert ended(["trial-1", "trial-2", "--json", "--reward", "0.5"], monkeypatch) == 0
    told = json.loads(capsys.readouterr().out)
    assert [run["name"] for run in told["runs"]] == ["trial-1", "trial-2"]
    assert told["reward_level"] == 0.5
    (paired,) = [each for each in told["paired"] if each["of"] == "reward, second half"]
    assert (paired["first"], paired["other"]) == ("trial-1", "trial-2")
    assert paired["low"] <= paired["difference"] <= paired["high"]
    assert paired["difference"] == pytest.approx(paired["mean_other"] - paired["mean_first"])
    assert 0 <= paired["p"] <= 1
    assert paired["significant"] == (paired["p"] < 0.05)
    assert told["settings"] == {"run.seed": [1, 2], "loop.max_staleness": [1, 2]}
    assert all(run["figures"]["exact_match_after"] == 0.75 for run in told["runs"])
    assert told["runs"][0]["figures"]["reached_seconds"] > 0
    assert not (runs / "comparison.html").exists()


def test_the_same_is_had_from_python(runs: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    told = streamrl.compare("trial-1", streamrl.Run("runs/trial-2"), level=0.5, out="page.html")
    assert ([run["name"] for run in told["runs"]], told["reward_level"]) == (["trial-1", "trial-2"], 0.5)
    assert told["paired"]
    assert (runs / "page.html").is_file()
    with pytest.raises(UserError, match="two runs or more"):
        streamrl.compare("trial-1")


def test_an_export_gives_what_the_run_did_not_keep(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    recorded = record_run(tmp_path / "trial", seconds=40.0)
    exporter = Exporter(recorded.history, "trial", recorded.directory.config, tmp_path / "export")
    asyncio.run(exporter.export(USUAL, []))
    write_facts(recorded.directory.gathered, RunFacts(environment={"CPU": "of then"}))
    assert ended([str(tmp_path / "trial"), "--export", str(tmp_path / "export")], monkeypatch) == 0
    kept = read_facts(recorded.directory.gathered)
    assert kept.environment == {"CPU": "of then"}
    assert kept.topics is not None
    assert sorted(kept.topics.workers) == ["worker-0", "worker-1", "worker-2"]
    assert "topics were not read" not in recorded.directory.report.read_text()


@pytest.mark.parametrize(
    ("arguments", "says"),
    [
        (["nowhere"], "expected a run's directory or its name under runs/, got nowhere, which does not exist"),
        (["empty"], "expected a run's directory, with config.resolved.toml, got empty, which has none"),
        (["project"], "got project, which has none; runs are in project/runs: one, two"),
        (["empty", "nowhere"], "got empty, which has none; and expected a run's directory or its name under runs/"),
        (["empty", "nowhere"], "got nowhere, which does not exist"),
        (["fresh"], "expected metrics.jsonl in fresh, which the trainer writes with its first step, found none yet"),
        (["stepless"], "expected at least one complete step in stepless/metrics.jsonl, found none"),
        (["broken"], "expected the files of a run in broken, got:"),
        (["odd"], "expected the gathered data of a run in odd/gathered.json, got"),
        (["trial-1", "runs/trial-1"], "expected different runs, got"),
        (["trial-1", "--out", "nowhere/a.html"], "expected to write the report to nowhere/a.html, got: No such file"),
        (["trial-1", "--out", "empty"], "expected to write the report to empty, got: Is a directory"),
        (["trial-1", "--reward", "nan"], "expected a number after --reward, got nan"),
        (
            ["trial-1", "trial-2", "--export", "empty"],
            "expected one run with --export, which holds one run's topics, got 2 runs",
        ),
        (["trial-1", "--export", "empty"], "expected a complete export with manifest.json in empty, found none"),
    ],
)
def test_a_mistake_ends_in_one_line(
    arguments: list[str],
    says: str,
    runs: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    for name in ("two", "one"):
        (runs / "project" / "runs" / name).mkdir(parents=True)
        (runs / "project" / "runs" / name / "config.resolved.toml").touch()
    for name in ("empty", "fresh", "stepless", "broken", "odd"):
        (runs / name).mkdir()
    (runs / "fresh" / "config.resolved.toml").write_text("")
    for name in ("stepless", "broken", "odd"):
        (runs / name / "metrics.jsonl").write_text('{"step": 1, "ti')
    (runs / "broken" / "summary.json").write_text("{")
    (runs / "odd" / "gathered.json").write_text('{"topics": 3}')
    assert ended(arguments, monkeypatch) == 2
    (line,) = capsys.readouterr().err.splitlines()
    assert line.startswith("error: ")
    assert says in line


def test_names_are_as_long_as_it_takes_to_tell_runs_apart() -> None:
    assert names_of([Path("/a/one/run"), Path("/a/two/run")]) == ["one/run", "two/run"]
    assert names_of([Path("/a/one"), Path("/a/two")]) == ["one", "two"]
    with pytest.raises(UserError, match="different runs"):
        names_of([Path("/a/one"), Path("/a/../a/one")])
