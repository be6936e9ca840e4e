"""`streamrl gateway keys`: for a run that has begun and for one that has not."""

from pathlib import Path

import pytest
from typer.testing import CliRunner

from streamrl.cli.app import app
from streamrl.schemas.errors import UserError

CONFIG = '[run]\nname = "k"\n[data]\ndataset = "chain_sum"\n[model]\npath = "m"\n'


def keys(*arguments: str) -> str:
    result = CliRunner().invoke(app, ["gateway", "keys", *arguments])
    if result.exception is not None:
        raise result.exception
    return result.stdout


def test_keys_are_made_listed_and_removed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    Path("my.toml").write_text(CONFIG)
    secret = keys("add", "alice", "--run", "my.toml", "--train", "--concurrent", "3").strip()
    assert secret.startswith("sk-streamrl-")
    assert keys("ls", "--run", "my.toml") == "alice: trained on; 3 concurrent\n"
    # The same by the run's name, once it has begun.
    Path("runs/k/config.resolved.toml").write_text(CONFIG)
    keys("add", "bob", "--run", "k")
    assert keys("ls", "--run", "k").splitlines()[1] == "bob: not trained on; no limits"
    assert keys("rm", "alice", "--run", "runs/k") == "removed: alice\n"
    assert secret not in Path("runs/k/gateway/keys.json").read_text()
    with pytest.raises(UserError, match="nowhere"):
        keys("ls", "--run", "nowhere")
