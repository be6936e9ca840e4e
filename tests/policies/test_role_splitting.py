"""`streamrl split` refuses impossible requests in one line, before it contacts the coordinator."""

from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file

from streamrl.policies import role_commands
from streamrl.policies.role_attaching import InstanceStatus
from streamrl.policies.role_splitting import _check_arms, _check_shapes, _check_shares, _check_workers, shares_in
from streamrl.schemas.errors import UserError
from streamrl.schemas.identifiers import PolicyVersion
from streamrl.schemas.weights import MANIFEST, WeightManifest, describe_file
from tests.coordinator.factories import heartbeat

KNOWN = [
    InstanceStatus("policy", "grpo", "run", served=True, alive=True),
    InstanceStatus("rloo", "rloo", "run", served=False, alive=True),
    InstanceStatus("dead", "rloo", "run", served=False, alive=False),
    InstanceStatus("gone", "rloo", "detached", served=False, alive=False),
]


def refused(text: str) -> "pytest.RaisesExc[UserError]":
    return pytest.raises(UserError, match=text, check=lambda error: error.exit_code == 2 and "\n" not in str(error))


def test_shares_are_named_one_by_one_and_are_one_together_at_most() -> None:
    assert shares_in(["a=0.25", "b=.5"]) == {"a": 0.25, "b": 0.5}
    for texts, why in ((["a"], "=SHARE"), (["=1"], "=SHARE"), (["a=x"], "=SHARE"), (["a=1", "a=1"], "once")):
        with refused(why):
            shares_in(texts)
    for shares, why in (({"a": 0.0}, "above 0"), ({"a": 1.5}, "up to 1"), ({"a": 0.6, "b": 0.5}, "at most 1")):
        with refused(why):
            _check_shares(shares)


def test_a_split_is_given_shares_or_off_and_not_both() -> None:
    for shares, off, got in ((None, False, "neither"), (["rloo=0.5"], True, "both")):
        with refused(f"expected either NAME=SHARE for each instance or --off, got {got}"):
            role_commands.split(Path("runs/demo"), shares, off=off)


def test_arms_are_instances_that_are_at_work_and_not_served() -> None:
    _check_arms({"rloo": 0.5}, KNOWN, "demo")
    for name, why in (
        ("other", "attached to run demo, got 'other'; attached are: dead, policy, rloo"),
        ("gone", "attached to run demo"),
        ("policy", "not served"),
        ("dead", "no heartbeat"),
        ("served", "another name"),
    ):
        with refused(why):
            _check_arms({name: 0.5}, KNOWN, "demo")


def test_each_arm_has_a_worker() -> None:
    _check_workers({"rloo": 0.5}, [heartbeat("w0"), heartbeat("w1")])
    _check_workers({"rloo": 1.0}, [heartbeat("w0")])
    with refused("each of 2 arms, including the served policy's, got 1; start more"):
        _check_workers({"rloo": 0.5}, [heartbeat("w0")])


def put(store: Path, shape: list[int]) -> None:
    directory = store / "1-2"
    directory.mkdir(parents=True)
    # Most published weights have this type, which numpy lacks.
    save_file({"a.weight": torch.zeros(shape, dtype=torch.bfloat16)}, directory / "model.safetensors")
    files = (describe_file(directory / "model.safetensors"),)
    manifest = WeightManifest(version=PolicyVersion(1, 2), step=2, files=files, created_at=0.0)
    (directory / MANIFEST).write_text(manifest.model_dump_json())


def test_an_arm_of_another_shape_is_refused(tmp_path: Path) -> None:
    (tmp_path / "config.resolved.toml").write_text("")
    put(tmp_path / "weights", [1])
    with refused("weights of rloo in .* got none yet"):
        _check_shapes({"rloo": 0.5}, tmp_path)
    put(tmp_path / "instances" / "rloo" / "weights", [1])
    _check_shapes({"rloo": 0.5}, tmp_path)
    put(tmp_path / "instances" / "wide" / "weights", [2])
    with refused(r"got a\.weight: \('BF16', \[2\]\) instead of \('BF16', \[1\]\)"):
        _check_shapes({"rloo": 0.5, "wide": 0.25}, tmp_path)
    (tmp_path / "instances" / "rloo" / "weights" / "1-2" / "model.safetensors").write_bytes(b"\xff" * 40)
    with refused(r"a readable safetensors file, got .*rloo.*; try again"):
        _check_shapes({"rloo": 0.5}, tmp_path)
