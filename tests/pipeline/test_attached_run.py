"""A second algorithm is attached to a run under way, killed, comes back, is attached again, given a share, promoted.

A long test; ``tests/policies/test_role_instance_trainer.py`` has the command, ``tests/policies`` the trainer,
``tests/policies/test_arms.py`` and ``tests/simulation`` the shares and the promotion.
"""

import asyncio
import json
import os
import re
import signal
import subprocess
from contextlib import ExitStack
from pathlib import Path

import pytest

import streamrl
from streamrl.bus.embedded.node import free_ports
from streamrl.inspection.audit.report import AlgorithmBalance
from streamrl.schemas.errors import UserError
from tests.pipeline.conftest import Start
from tests.pipeline.local_run import CLI, EMULATED, ENVIRONMENT, LocalRun

pytestmark = [pytest.mark.long, pytest.mark.timeout(600)]


def said(run: LocalRun) -> Path:
    return run.directory.parent / "attached.out"


def attach(run: LocalRun, *options: str) -> "subprocess.Popen[bytes]":
    with said(run).open("ab") as file:
        command = [*CLI, "attach", "second", "--run", str(run.directory), *options]
        return subprocess.Popen(command, stdout=file, stderr=file, env={**os.environ, **ENVIRONMENT})


def own_steps(run: LocalRun) -> list[tuple[int, int]]:
    """Lineage and step of each line of the instance's metrics."""
    path = run.directory / "instances" / "second" / "metrics.jsonl"
    lines = path.read_text().splitlines() if path.exists() else []
    rows = [json.loads(line) for line in lines if line.endswith("}")]
    return [(int(row["lineage/number"]), int(row["step"])) for row in rows]


def relay_with_copies(run: LocalRun, store: Path) -> "subprocess.Popen[bytes]":
    """As on another host, whose workers it serves; here the run's own are near it as well."""
    (port,) = free_ports(1)
    config = run.directory / "config.resolved.toml"
    command = [*CLI, "relay", str(config), f"--relay.port={port}", f"--relay.store={store}"]
    with said(run).open("ab") as file:
        return subprocess.Popen(command, stdout=file, stderr=file, env={**os.environ, **ENVIRONMENT})


async def half_of_the_groups_are_sampled_by_the_instance_until_the_split_is_over(
    run: LocalRun, handle: streamrl.Run, stack: ExitStack
) -> None:
    def arms_of(path: Path) -> list[set[str]]:
        """By step of a trainer's metrics, the arms that its trajectories are of."""
        rows = [json.loads(line) for line in path.read_text().splitlines() if line.endswith("}")]
        return [{key.split("/")[1] for key in row if key.startswith("arms/")} for row in rows]

    for shares, why in (
        ({"third": 0.5}, "attached to run"),
        ({"second": 0.5, "policy": 0.25}, "not served, got 'policy'"),
        ({"second": 1.5}, "up to 1"),
    ):
        with pytest.raises(UserError, match=why):
            await asyncio.to_thread(handle.split, shares)
    copies = run.directory.parent / "copies"
    relay = stack.enter_context(relay_with_copies(run, copies))
    stack.callback(relay.kill)
    await asyncio.to_thread(handle.split, {"second": 0.5})
    run.wait_until(
        lambda: any(copies.glob("*/arms/second/*/manifest.json")), "weights of the arm at the relay of copies"
    )
    run.wait_until(lambda: "worker-1@second/" in run.text(), "weights of the instance at a worker")
    both = {"served", "second"}
    own, other = (run.directory / place / "metrics.jsonl" for place in ("", "instances/second"))
    run.wait_until(lambda: both in arms_of(own), "a step of the served trainer with both arms")
    run.wait_until(lambda: both in arms_of(other), "a step of the instance with both arms")
    told = await asyncio.to_thread(handle.instances)
    assert [(one["name"], one["share"], one["workers"]) for one in told] == [("policy", 0.5, None), ("second", 0.5, 1)]
    assert all(one["sampled"] > 0 and one["sampled_reward"] is not None for one in told)
    # What a killed worker had is sampled by who is dealt to its arm then; of a killed relay another one sends the rest.
    run.kill_child("worker-1")
    relay.kill()
    before = run.steps()
    run.wait_until(
        lambda: run.steps() > before + 20 and "second" in arms_of(own)[-1], "steps of both arms after a kill"
    )
    await asyncio.to_thread(handle.split, None)
    run.wait_until(lambda: not any(arms_of(own)[-3:]), "steps of the served policy's trajectories alone")


async def two_steps_of_it_and_one_after_a_kill(run: LocalRun) -> None:
    """A second attach of its name is refused, and its killed trainer comes back."""
    run.wait_until(lambda: len(own_steps(run)) >= 2, "two steps of the instance")
    kept = (run.directory / "instances" / "second" / "config.resolved.toml").read_text()
    again = attach(run, "--set", "training.learning_rate=0.5")
    assert await asyncio.to_thread(again.wait, 60) == 2
    assert (run.directory / "instances" / "second" / "config.resolved.toml").read_text() == kept
    assert "error: expected no other command to attach second" in said(run).read_text()
    # As by the kernel when memory is short: the command starts it again.
    (pid,) = re.findall(r"process=trainer-second pid=(\d+)", said(run).read_text())
    os.kill(int(pid), signal.SIGKILL)
    run.wait_until(lambda: any(lineage == 2 for lineage, _ in own_steps(run)), "a step after its trainer was killed")
    assert "signal SIGKILL" in said(run).read_text()
    assert (run.directory / "instances" / "second" / "logs" / "trainer.log").stat().st_size > 0


def accounts_that_balance(run: LocalRun) -> dict[str, AlgorithmBalance]:
    """What the audit says of the run's own trainer and of the instance."""
    report = streamrl.Run(run.directory).audit()
    found = {own.algorithm: own for own in report.algorithms}
    assert report.is_balanced, report.violations
    assert set(found) == {"grpo", "second"}
    assert found["second"].trained > 0
    return found


async def test_an_attached_instance_that_is_killed_given_a_share_and_promoted_costs_no_record(start: Start) -> None:
    run = start("--training.max_steps=100000", "--training.weight_transfer=delta", run={"workers": 2}, **EMULATED)
    run.wait_until(lambda: run.steps() >= 2, "two steps")
    instance = attach(run, "--algorithm", "rloo", "--from", "beginning")
    try:
        await two_steps_of_it_and_one_after_a_kill(run)
        # The command is killed, and the trainer with it: the run goes on without either.
        instance.kill()
        instance.wait()
        before = run.steps()
        run.wait_until(lambda: run.steps() > before, "a step without it")
        instance = streamrl.Run(run.directory).attach("second")  # as `streamrl attach` without options
        run.wait_until(lambda: any(lineage == 3 for lineage, _ in own_steps(run)), "a step after the kill")
        told = await asyncio.to_thread(streamrl.Run(run.directory).instances)
        assert [(one["name"], one["served"], one["mode"]) for one in told] == [
            ("policy", True, "run"),
            ("second", False, "run"),
        ]
        handle = streamrl.Run(run.directory)
        with ExitStack() as stack:
            await half_of_the_groups_are_sampled_by_the_instance_until_the_split_is_over(run, handle, stack)
        # Workers follow it from now on, wait for it once it is gone, and go on when it is attached again.
        await asyncio.to_thread(handle.promote, "second")
        run.wait_until(lambda: "worker-0@4-" in run.text(), "weights of the promoted instance at the worker")
        instance.kill()
        instance.wait()
        run.wait_until(lambda: "`streamrl attach second --run" in run.text(), "a word on what to do")
        instance = handle.attach("second")
        run.wait_until(lambda: "worker-0@5-" in run.text(), "weights of the instance that is served again")
        told = await asyncio.to_thread(handle.instances)
        assert [(one["name"], one["served"]) for one in told] == [("policy", False), ("second", True)]
        await asyncio.to_thread(handle.promote, "policy")
        run.wait_until(lambda: "worker-0@6-" in run.text(), "weights of the run's own trainer at the worker")
        await asyncio.to_thread(handle.detach, "second")
        assert instance.wait(60) == 0
        before = run.steps()
        run.wait_until(lambda: run.steps() > before, "a step without it")
        run.end()
    finally:
        if instance.poll() is None:
            instance.kill()
            instance.wait()
    found = accounts_that_balance(run)
    assert found["grpo"].lineages == (1, 2, 6)  # above those that were served meanwhile
    assert found["second"].lineages[-1] == 6  # of which those are left that the kills did not undo
