"""``status``, ``lag`` and ``top`` of a run that has ended, after its broker is gone."""

import json
import socket
from pathlib import Path
from typing import Any

import pytest
from typer.main import get_command

from streamrl.cli.app import app
from streamrl.inspection.diagnostics import connect as connecting
from streamrl.inspection.diagnostics.connect import BrokerStopped, TopicsMissing, connect
from streamrl.schemas.errors import BusUnavailable, UserError

SUMMARY: dict[str, Any] = {
    "resumed_from": 4, "steps": 12, "run_seconds": 32.6, "trajectories": 1024, "trajectories_per_s": 184.4,
    "tokens_per_s": 3287.0, "step_seconds": 8.3, "staleness_mean": 1.4, "staleness_max": 3.0,
    "trainer_wait_share": 0.5, "reward_first": 0.1, "reward_last": 0.6, "skipped": {"stale": 8}, "skip_causes": {},
    "lag": 384, "lag_by_bucket": {"0": 380, "1": 4},
}  # fmt: skip
METRICS = {"reward": 0.625, "off_policy/mean": 1.5, "off_policy/max": 3.0, "kafka/lag/bucket_0": 7.0}
HEAD = "run mine has finished at step 12 of 12; no broker has its topics, so the figures are from its files"


@pytest.fixture(autouse=True)
def elsewhere(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """On a machine without a broker of `streamrl kafka up`."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("STREAMRL_CACHE", str(tmp_path / "cache"))
    monkeypatch.delenv("STREAMRL_KAFKA__BOOTSTRAP_SERVERS", raising=False)


def ended(tmp_path: Path, *, kafka: str = "", last_step: int = 12, **changes: Any) -> Path:
    """A run of twelve steps in the working directory, whose trainer took ``last_step`` of them."""
    run = tmp_path / "runs" / "mine"
    run.mkdir(parents=True)
    (run / "config.resolved.toml").write_text(
        '[run]\nname = "mine"\n[model]\npath = "m"\n[data]\npath = "p.jsonl"\n[training]\nmax_steps = 12\n'
        + (f'[kafka]\nbootstrap_servers = "{kafka}"\n' if kafka else "")
    )
    (run / "summary.json").write_text(json.dumps(SUMMARY | changes))
    lines = [json.dumps({"step": step, "time": 1000.0 + step, **METRICS}) for step in range(1, last_step + 1)]
    (run / "metrics.jsonl").write_text("\n".join(lines) + "\n")
    return run


def said(capsys: pytest.CaptureFixture[str], *arguments: str) -> list[str]:
    assert get_command(app).main([*arguments, "--run", "mine"], standalone_mode=False) == 0
    return capsys.readouterr().out.splitlines()


def told(capsys: pytest.CaptureFixture[str], *arguments: str) -> dict[str, Any]:
    found: dict[str, Any] = json.loads(said(capsys, *arguments, "--json")[-1])
    return found


def test_status_has_the_last_step_and_the_figures_of_the_end(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    ended(tmp_path)
    lines = said(capsys, "status")
    assert lines[:2] == [HEAD, "reward: 0.100 → 0.600 (first and last 5 steps)"]
    assert "384 left over: sampled, not trained before the run ended" in lines
    found = told(capsys, "status")
    assert (found["health"], found["step"], found["max_steps"], found["lag"]) == ("finished", 12, 12, 384)
    assert found["summary"] == SUMMARY


def test_lag_has_what_was_left_over(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    ended(tmp_path)
    left = "lag 384 left over: sampled, not trained before the run ended  (bucket 0: 380  bucket 1: 4)"
    assert said(capsys, "lag") == [HEAD, left]
    found = told(capsys, "lag")
    assert (found["lag"], found["lag_by_bucket"], found["groups"]) == (384, {"0": 380, "1": 4}, [])


@pytest.mark.parametrize("more", [[], ["--once"], ["--plain"]])
def test_top_is_one_line(more: list[str], tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    ended(tmp_path)
    assert said(capsys, "top", *more)[-2:] == [
        HEAD,
        "mine finished  step 12/12  reward 0.625  184 traj/s  staleness 1.5 (max 3)  lag b0:380 b1:4  skipped stale:8",
    ]
    found = told(capsys, "top")
    assert (found["loop"]["reward"], found["loop"]["skipped"], found["lag"]["lag"]) == (0.625, 8, [380, 4])


def test_a_run_that_was_stopped_says_so(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    ended(tmp_path, last_step=7, steps=7)
    assert said(capsys, "lag")[0].startswith("run mine has stopped at step 7 of 12; ")


def test_an_older_summary_leaves_the_lag_of_the_last_step(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    run = ended(tmp_path)
    (run / "summary.json").write_text(json.dumps({key: SUMMARY[key] for key in SUMMARY if not key.startswith("lag")}))
    assert said(capsys, "lag")[1] == "lag 7 left over: sampled, not trained before the run ended  (bucket 0: 7)"


def test_the_summary_of_an_earlier_start_is_not_the_end(tmp_path: Path) -> None:
    """The run was continued, and its trainer was killed."""
    ended(tmp_path, steps=7)
    with pytest.raises(BrokerStopped, match="expected a running broker of run mine"):
        get_command(app).main(["lag", "--run", "mine"], standalone_mode=False)


def test_a_broker_elsewhere_that_is_gone_is_not_needed(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    with socket.socket() as nobody:
        nobody.bind(("127.0.0.1", 0))  # bound and not listening: connections are refused
        ended(tmp_path, kafka=f"127.0.0.1:{nobody.getsockname()[1]}")
        assert said(capsys, "lag")[0] == HEAD


@pytest.mark.parametrize("error", [BusUnavailable("no broker answers"), TopicsMissing("no topics")])
def test_a_run_that_may_go_on_elsewhere_is_not_said_to_have_ended(
    error: UserError, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    async def refuses(_: object) -> None:
        raise error

    ended(tmp_path, kafka="127.0.0.1:1", last_step=7, steps=7)
    monkeypatch.setattr(connecting.RunConnection, "with_run", refuses)
    with pytest.raises(type(error)):
        get_command(app).main(["status", "--run", "mine"], standalone_mode=False)


def test_commands_that_need_the_topics_say_that_the_run_has_finished(tmp_path: Path) -> None:
    run = ended(tmp_path)
    with pytest.raises(BrokerStopped, match=r"^run mine has finished, and no running broker has its topics: name one"):
        connect(Path("mine"), None)
    (run / "kafka" / "node-1").mkdir(parents=True)
    with pytest.raises(BrokerStopped, match=r"^run mine has finished.*streamrl kafka up --data-dir runs/mine/kafka"):
        connect(Path("mine"), None)
