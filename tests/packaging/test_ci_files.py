"""Files that other programs read: the workflow of the hosting site, and the hooks of pre-commit."""

import json
from importlib import resources
from typing import Any

import jsonschema
import yaml

from tests.architecture.sources import ROOT


def _read(name: str) -> Any:
    return yaml.safe_load((ROOT / name).read_text())


def test_the_workflow_is_valid_calls_ci_run_and_uploads_nothing() -> None:
    workflow = _read(".github/workflows/ci.yml")
    schemas = resources.files("check_jsonschema").joinpath("builtin_schemas/vendor/github-workflows.json")
    # YAML 1.1 reads the key "on" as true.
    jsonschema.validate(
        {"on" if key is True else key: value for key, value in workflow.items()}, json.loads(schemas.read_text())
    )
    (job,) = workflow["jobs"].values()
    assert ".ci/run" in [step.get("run") for step in job["steps"]]
    assert workflow["permissions"] == {"contents": "read"}
    assert {step["uses"].partition("@")[0] for step in job["steps"] if "uses" in step} == {
        "actions/checkout",
        "actions/setup-python",
    }


def test_hooks_run_the_linter_of_the_environment_and_download_nothing() -> None:
    (source,) = _read(".pre-commit-config.yaml")["repos"]
    assert source["repo"] == "local"
    assert all(hook["language"] == "system" for hook in source["hooks"])
    assert [hook["entry"].split()[0] for hook in source["hooks"]] == [".venv/bin/ruff"] * 2
