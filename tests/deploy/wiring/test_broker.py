from pathlib import Path

import pytest

from streamrl.deploy.wiring.broker import existing_broker
from streamrl.schemas.errors import SettingsError


def test_a_single_process_joins_a_broker_and_never_starts_one(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("STREAMRL_CACHE", str(tmp_path))
    assert existing_broker("host:9092", print) == "host:9092"
    with pytest.raises(SettingsError, match=r"expected kafka\.bootstrap_servers, got none"):
        existing_broker(None, print)
