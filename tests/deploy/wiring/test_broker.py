import fcntl
from pathlib import Path

import pytest

from streamrl.deploy.wiring.broker import existing_broker
from streamrl.schemas.errors import SettingsError
from streamrl.settings.loading import load_settings
from streamrl.settings.tree import Settings


@pytest.fixture(autouse=True)
def elsewhere(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """In a directory without runs, on a machine without a broker of `streamrl kafka up`."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("STREAMRL_CACHE", str(tmp_path))


def settings(*options: str) -> Settings:
    return load_settings(None, ["--run.name=mine", "--model.path=m", "--data.path=p.jsonl", *options])


def test_a_single_process_joins_a_broker_and_never_starts_one() -> None:
    assert existing_broker(settings("--kafka.bootstrap_servers=host:9092"), print) == "host:9092"
    with pytest.raises(SettingsError, match=r"a broker of run mine, got no kafka\.bootstrap_servers, .* with --run"):
        existing_broker(settings(), print)


def test_a_process_finds_the_broker_that_the_run_started(tmp_path: Path) -> None:
    node = tmp_path / "runs/mine/kafka/node-1"
    node.mkdir(parents=True)
    (node / "server.properties").write_text("listeners=PLAINTEXT://127.0.0.1:9123\n")
    with (node / "lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)  # a running node holds it
        assert existing_broker(settings(), print) == "127.0.0.1:9123"
    with pytest.raises(SettingsError, match=r"running broker of run mine, got none: .* `streamrl run runs/mine/config"):
        existing_broker(settings(), print)
