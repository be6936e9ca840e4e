import sys
from dataclasses import replace
from pathlib import Path

import pytest

from streamrl.deploy.local.specs import ChildSpecs
from streamrl.deploy.local.supervisor import Child
from streamrl.settings.features import ChildProcess
from streamrl.settings.placement import Placement, ProcessPlace
from streamrl.settings.run_directory import RunDirectory


def test_a_run_has_these_processes() -> None:
    names = [spec.name for spec in ChildSpecs(RunDirectory(Path("runs/x")), []).all(2)]
    assert names == ["coordinator", "relay", "trainer", "worker-0", "worker-1", "dispatcher"]


def test_processes_of_features_are_started_as_they_say() -> None:
    directory = RunDirectory(Path("runs/x"))
    added = [
        ChildProcess("helper-1", "helper", ("--id", "helper-1")),
        ChildProcess("judge", "judge", optional=True, awaited=True, is_single=True),
        ChildProcess("near", "near", on_trainer_devices=True),
    ]
    placement = Placement(trainer=ProcessPlace(devices=(0,), visible="0", threads=2))
    making = ChildSpecs(directory, [], placement=placement)
    helper, judge, near = (spec for spec in making.all(1, others=added) if spec not in making.all(1))
    assert near.environment["CUDA_VISIBLE_DEVICES"] == "0", "those of the trainer"
    assert (helper.name, helper.optional, helper.essential, helper.awaited) == ("helper-1", False, False, False)
    assert helper.command[4:] == ["helper", str(directory.config), "--id", "helper-1"]
    assert (judge.optional, judge.awaited, judge.is_single) == (True, True, True)


def test_a_trainer_from_elsewhere_is_not_started_here() -> None:
    names = [spec.name for spec in ChildSpecs(RunDirectory(Path("runs/x")), []).all(0, trainer=False)]
    assert names == ["coordinator", "relay", "dispatcher"]


@pytest.mark.processes
async def test_children_get_secrets_in_their_environment_and_the_other_settings_from_their_file_alone(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("STREAMRL_LOOP__MODE", "stream")
    monkeypatch.setenv("STREAMRL_KAFKA__SASL_PLAIN_PASSWORD", "beaten-by-the-command-line")
    directory = RunDirectory(tmp_path)
    specs = ChildSpecs(directory, [], {"STREAMRL_KAFKA__SASL_PLAIN_PASSWORD": "hush-4711"}).all(1)
    assert not [spec for spec in specs if "hush-4711" in " ".join(spec.command) + repr(spec)]
    assert all(spec.environment["STREAMRL_KAFKA__SASL_PLAIN_PASSWORD"] == "hush-4711" for spec in specs)
    printing = [sys.executable, "-c", "import os; print(*(n for n in os.environ.items() if '__' in n[0]), sep='|')"]
    child = await Child.start(replace(specs[0], command=printing))
    assert await child.process.wait() == 0
    printed = {line for line in child.last_line().split("|") if "STREAMRL" in line}
    assert printed == {"('STREAMRL_KAFKA__SASL_PLAIN_PASSWORD', 'hush-4711')"}
