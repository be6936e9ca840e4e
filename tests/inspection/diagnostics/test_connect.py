from pathlib import Path

import pytest
from typer.main import get_command

from streamrl.bus.kafka.settings import KafkaSettings
from streamrl.cli.app import app
from streamrl.inspection.diagnostics.connect import RunConnection, connect, runs_of
from streamrl.schemas.errors import SettingsError, UserError


@pytest.fixture(autouse=True)
def elsewhere(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """In a directory without runs, on a machine without a broker of `streamrl kafka up`."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("STREAMRL_CACHE", str(tmp_path / "cache"))
    for name in ("STREAMRL_KAFKA__BOOTSTRAP_SERVERS", "STREAMRL_KAFKA__SECURITY_PROTOCOL"):
        monkeypatch.delenv(name, raising=False)


def config(tmp_path: Path, kafka: str = "") -> Path:
    path = tmp_path / "run.toml"
    path.write_text(
        '[run]\nname = "mine"\n[model]\npath = "m"\n[data]\npath = "p.jsonl"\n'
        + (f"[kafka]\n{kafka}\n" if kafka else "")
    )
    return path


def test_a_broker_alone_is_enough() -> None:
    found = connect(None, "broker:9092")
    assert (found.address, found.run, found.settings) == ("broker:9092", "", None)


def test_a_configuration_names_run_and_broker_and_the_command_line_wins(tmp_path: Path) -> None:
    path = config(tmp_path, 'bootstrap_servers = "a:1"\nsecurity_protocol = "SSL"')
    assert connect(path, None).address == "a:1"
    found = connect(path, "b:2")
    assert (found.address, found.run, found.kafka.security_protocol) == ("b:2", "mine", "SSL")


def test_a_name_given_with_a_broker_is_a_runs_name(tmp_path: Path) -> None:
    assert connect(Path("mine"), "b:2").run == "mine"


def test_security_comes_from_the_environment_when_only_a_broker_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("STREAMRL_KAFKA__SECURITY_PROTOCOL", "SASL_SSL")
    assert connect(None, "b:2").kafka.security_protocol == "SASL_SSL"
    monkeypatch.setenv("STREAMRL_KAFKA__SECURITY_PROTOCOL", "NONE")
    with pytest.raises(SettingsError, match=r"kafka\.security_protocol"):
        connect(None, "b:2")


def test_without_any_broker_it_says_how_to_name_one(tmp_path: Path) -> None:
    with pytest.raises(UserError, match="--bootstrap-servers"):
        connect(None, None)
    with pytest.raises(UserError, match=r"run mine, got none: name one with --boot"):
        connect(config(tmp_path), None)
    with pytest.raises(UserError, match="got No Run!, which does not exist"):
        connect(Path("No Run!"), "b:2")


def test_a_finished_run_says_how_to_restart_its_broker(tmp_path: Path) -> None:
    path = config(tmp_path)
    (tmp_path / "runs/mine/kafka/node-1").mkdir(parents=True)
    with pytest.raises(UserError, match=r"`streamrl kafka up --data-dir runs/mine/kafka`"):
        connect(path, None)


def test_only_the_broker_of_the_run_itself_can_be_started_again_by_its_data() -> None:
    data = Path("runs/my bad/kafka")
    found = RunConnection(KafkaSettings(bootstrap_servers="127.0.0.1:21190"), "my-bad", data=data)
    assert found.advice == (
        "if run my-bad has ended, its broker has stopped too: "
        "`streamrl kafka up --data-dir 'runs/my bad/kafka' --port 21190` starts it again"
    )
    three = RunConnection(KafkaSettings(bootstrap_servers="h:1,h:7,h:9"), "my-bad", data=data)
    assert "kafka' --nodes 3` starts" in three.advice
    assert connect(Path("mine"), "b:2").advice == ""


def test_a_run_that_is_named_is_looked_for_at_its_own_broker(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("mine", "newest"):
        directory = tmp_path / "runs" / name
        directory.mkdir(parents=True)
        (directory / "config.resolved.toml").write_text(config(tmp_path).read_text().replace("mine", name))
    monkeypatch.setattr("streamrl.inspection.diagnostics.connect.own_broker", lambda run: f"{run.path.name}:1")
    assert (connect(Path("mine"), None).run, connect(Path("mine"), None).address) == ("mine", "mine:1")
    assert connect(Path("mine"), "b:2").address == "b:2"
    assert connect(Path("elsewhere"), None).address == "newest:1"


@pytest.mark.parametrize(
    "command", [["pause"], ["resume"], ["drain", "--worker", "w"], ["topics", "diff"], ["topics", "apply"], ["status"]]
)
def test_commands_about_a_run_start_no_broker_of_their_own(command: list[str], monkeypatch: pytest.MonkeyPatch) -> None:
    def never(*_: object, **__: object) -> None:
        raise AssertionError("a broker was started")

    monkeypatch.setattr("streamrl.bus.embedded.cluster.start_cluster", never)
    with pytest.raises(UserError, match=r"expected run mine under runs/, or a running broker .*, got none .*--boot"):
        get_command(app).main([*command, "--run", "mine"], standalone_mode=False)


def test_runs_are_found_by_their_topics() -> None:
    topics = ["a.steps", "a.trajectories", "b.c.steps", "b.c.trajectories", "d.steps", "__consumer_offsets"]
    assert runs_of(topics) == ["a", "b.c"]


@pytest.mark.asyncio(loop_scope="session")
async def test_a_missing_run_is_reported_with_the_existing_ones(living_run: RunConnection) -> None:
    assert await living_run.with_run() is living_run
    with pytest.raises(UserError, match=living_run.run):
        await RunConnection(living_run.kafka, "no-such").with_run()
