import fcntl
import json
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from streamrl.deploy.local.run_store import list_runs, remove_runs, run_facts, stored_runs
from streamrl.observability.run_state.evaluations import OVERALL
from streamrl.schemas.errors import UserError
from streamrl.schemas.evaluation import EVALUATED
from streamrl.schemas.starts import RunStart, append_start
from streamrl.settings.run_directory import RunDirectory
from tests.inspection.report.recorded import CONFIG


def a_run(root: Path, name: str, *, steps: int = 3, most: float = 3.0, own_broker: bool = True) -> RunDirectory:
    """What a run leaves, as far as it matters here."""
    directory = RunDirectory(root / name)
    directory.create()
    directory.config.write_text(CONFIG.format(name=name, seed=1))
    lines = [
        json.dumps({"step": n, "time": 1e9 + n, "reward": n / 4, "progress/max_steps": most})
        for n in range(1, steps + 1)
    ]
    directory.metrics.write_text("\n".join([*lines, '{"step": 99, "cut']))
    directory.summary.write_text(json.dumps({"steps": steps}))
    (directory.logs / "trainer.log").write_bytes(b"x" * 100_000)
    if own_broker:
        node = directory.kafka / "node-1"
        node.mkdir(parents=True)
        (node / "server.properties").write_text("listeners=PLAINTEXT://127.0.0.1:9,CONTROLLER://127.0.0.1:10\n")
        (node / "lock").write_text("")
    return directory


@contextmanager
def running(directory: RunDirectory) -> Iterator[None]:
    with (directory.kafka / "node-1" / "lock").open("rb") as held:
        fcntl.flock(held, fcntl.LOCK_EX)
        yield


def test_runs_are_listed_with_what_they_reached_and_take_up(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    going, looked_at = a_run(tmp_path, "going", most=10.0), a_run(tmp_path, "looked-at")
    more = a_run(tmp_path, "more")
    more.config.write_text(more.config.read_text() + "[training]\nmax_steps = 10\n")
    a_run(tmp_path, "over")
    a_run(tmp_path, "stopped", most=10.0)
    (tmp_path / "no-run").mkdir()
    with running(going), running(looked_at), running(more):
        assert {run.name: run.state for run in stored_runs(tmp_path)} == {
            "going": "running", "looked-at": "finished", "more": "running", "over": "finished", "stopped": "stopped",
        }  # fmt: skip
        assert list_runs(tmp_path, as_json=True) == 0
    told = [json.loads(line) for line in capsys.readouterr().out.splitlines()]
    assert {(run["step"], run["reward"]) for run in told} == {(3, 0.75)}
    assert all(100_000 <= run["bytes"] < 1_000_000 for run in told)
    assert {run["at"] for run in told} == {1e9 + 3}, "the time of the step, not of the file"
    assert list_runs(tmp_path, as_json=False) == 0
    assert "5 runs, 0." in capsys.readouterr().out


def test_a_page_of_runs_gets_their_start_and_held_out_result_without_their_sizes(tmp_path: Path) -> None:
    run = a_run(tmp_path, "mine")
    rows = [{"step": step, EVALUATED: "1-3", OVERALL: passed} for step, passed in ((2, 0.25), (9, 0.75))]
    run.metrics.write_text("".join(f"{json.dumps(row)}\n" for row in rows) + run.metrics.read_text())
    append_start(run.starts, RunStart(at=7.0, step=0))
    append_start(run.starts, RunStart(at=9.0, step=2))
    (found,) = run_facts(tmp_path)
    # The evaluation of step 9 is of weights that a resumed trainer has undone.
    assert (found["started"], found["held_out"], found["step"], found["state"]) == (7.0, 0.25, 3, "finished")
    assert "bytes" not in found


def test_a_living_run_is_never_removed(tmp_path: Path) -> None:
    over, going = a_run(tmp_path, "over"), a_run(tmp_path, "going")
    with (
        running(going),
        pytest.raises(UserError, match=r"going to be stopped, got its broker running at 127\.0\.0\.1:9"),
    ):
        remove_runs(tmp_path, ["over", "going"], keep_results=False, ask=False)
    assert over.config.is_file()


def test_only_runs_are_removed(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    run, other = a_run(tmp_path, "mine"), tmp_path / "precious"
    other.mkdir()
    for name in ("precious", "../precious", str(other), "."):
        with pytest.raises(UserError, match="expected the name of a run"):
            remove_runs(tmp_path, [name], keep_results=False, ask=False)
    with pytest.raises(UserError, match="give --yes"):
        remove_runs(tmp_path, ["mine"], keep_results=False, ask=True)
    assert remove_runs(tmp_path, ["mine"], keep_results=True, ask=False) == 0
    assert not run.kafka.exists()
    assert not run.logs.exists()
    assert run.summary.is_file()
    assert run.metrics.is_file()
    assert remove_runs(tmp_path, ["mine"], keep_results=False, ask=False) == 0
    assert not run.path.exists()
    assert other.is_dir()
    assert "removed: 0." in capsys.readouterr().out


@pytest.mark.parametrize(
    "line",
    [
        '{"step": null, "reward": 0.5}', '{"step": "4"}', '{"step": Infinity}',
        '{"step": 3, "reward": "high", "progress/max_steps": [3]}', '{"step": 3, "reward": NaN}',
    ],
)  # fmt: skip
def test_a_line_that_is_no_step_hides_neither_its_run_nor_the_others(
    line: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    bad = a_run(tmp_path, "bad")
    bad.metrics.write_text(f"{bad.metrics.read_text()}\n{line}\n")
    a_run(tmp_path, "good")
    assert list_runs(tmp_path, as_json=False) == 0
    assert "2 runs, " in capsys.readouterr().out
    assert {(run.name, run.step) for run in stored_runs(tmp_path)} == {("bad", 3), ("good", 3)}


@pytest.mark.parametrize("config", [b"not toml", b"\xff", b"[nowhere]\nkey = 1\n"])
def test_a_run_whose_settings_cannot_be_read_can_be_removed(
    config: bytes, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    run = a_run(tmp_path, "broken", own_broker=False)
    run.config.write_bytes(config)
    assert remove_runs(tmp_path, ["broken"], keep_results=False, ask=False) == 0
    assert not run.path.exists()
    assert "could not check whether run broken is alive (" in capsys.readouterr().err


def test_a_run_of_another_release_is_asked_for_at_its_broker(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    run = a_run(tmp_path, "earlier", own_broker=False)
    run.config.write_text('[nowhere]\nkey = 1\n[kafka]\nbootstrap_servers = "127.0.0.1:1"\n')
    assert remove_runs(tmp_path, ["earlier"], keep_results=False, ask=False) == 0
    assert "127.0.0.1:1" in capsys.readouterr().err


def test_topics_on_anothers_broker_are_named(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    a_run(tmp_path, "guest", own_broker=False)
    assert remove_runs(tmp_path, ["guest"], keep_results=False, ask=False) == 0
    assert "`streamrl topics rm --run guest`" in capsys.readouterr().out


def test_a_run_directory_explains_itself(tmp_path: Path) -> None:
    page = (a_run(tmp_path, "mine").path / "README.md").read_text()
    for name in ("report.html", "summary.json", "metrics.jsonl", "checkpoints", "logs", "kafka", "records.sqlite"):
        assert name in page
