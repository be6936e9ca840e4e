"""What the base installation runs: every process and command that uses no optional package."""

import subprocess
import sys
from typing import Any

import pytest

from streamrl.deploy.local.task_check import require_extras
from streamrl.schemas.errors import SettingsError
from streamrl.settings.loading import validated

TASK: dict[str, Any] = {
    "model": {"path": "model"},
    "data": {"path": "prompts.jsonl"},
    "rewards": {"functions": ["exact_match"]},
}
OF_EXTRAS = ("streamrl.producers.gateway.", "streamrl.producers.rewards.mathematics")
"""Modules that only the extras gateway and math need, and that are imported where those are used."""
IMPORTS = """
import importlib, pkgutil, sys
import streamrl
from streamrl.schemas.extras import EXTRAS, missing_package
# With this value, a module is neither imported nor found by find_spec.
sys.modules |= {module: None for modules in EXTRAS.values() for module in modules}
for room in ("cli", "coordinator", "consumers", "deploy", "producers", "weights"):
    root = importlib.import_module(f"streamrl.{room}")
    for found in pkgutil.walk_packages(root.__path__, f"streamrl.{room}."):
        if "vllm" in found.name:
            continue
        try:
            importlib.import_module(found.name)
        except ModuleNotFoundError as error:
            assert missing_package(error), found.name
            print(found.name)
"""


@pytest.mark.processes
def test_all_roles_but_the_gateway_load_without_any_extra() -> None:
    command = [sys.executable, "-c", IMPORTS]
    done = subprocess.run(command, capture_output=True, text=True, timeout=240, check=False)
    assert done.returncode == 0, done.stderr
    assert all(name.startswith(OF_EXTRAS) for name in done.stdout.split()), done.stdout


@pytest.mark.parametrize(
    ("section", "values", "extra"),
    [
        ("gateway", {"enabled": True}, "gateway"),
        ("telemetry", {"traces": "file"}, "traces"),
        ("lengths", {"predictor": "learned"}, "learned"),
        ("training", {"lora": {"rank": 4}}, "lora"),
    ],
)
def test_a_run_is_refused_before_its_start_only_if_its_settings_need_an_extra(
    section: str, values: dict[str, Any], extra: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("streamrl.schemas.extras.find_spec", lambda name: None)
    require_extras(validated(TASK))
    with pytest.raises(SettingsError, match=rf"for {section}\..*pip install 'streamrl\[{extra}\]'$"):
        require_extras(validated(TASK | {section: values}))


def test_adapters_need_no_package_where_no_trainer_runs(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("streamrl.schemas.extras.find_spec", lambda name: None)
    require_extras(validated(TASK | {"training": {"lora": {"rank": 4}}, "run": {"trainer": False}}))
