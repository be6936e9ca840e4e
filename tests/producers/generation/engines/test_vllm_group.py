"""The processes of a vLLM engine end with whoever started them, killed or not, and lead a process group."""

import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import psutil
import pytest

PROGRAM = """
import json, multiprocessing, os, sys, time
from producers.generation.engines.vllm_decoder import vllm_environment
from producers.generation.engines.vllm_group import EngineErrors, spawning_a_group

SPAWN = multiprocessing.get_context("spawn")


def tell(name):
    with open(f"{sys.argv[1]}/{name}.part", "w") as told:
        json.dump({"pid": os.getpid(), "group": os.getpgrp(), "environment": dict(os.environ)}, told)
    os.rename(told.name, f"{sys.argv[1]}/{name}")


def core():
    rank = SPAWN.Process(target=tell_and_wait, args=("rank",))
    rank.start()
    tell_and_wait("core")


def tell_and_wait(name):
    tell(name)
    time.sleep(60)


if __name__ == "__main__":
    with vllm_environment(3), spawning_a_group(EngineErrors()):
        SPAWN.Process(target=core).start()
    assert SPAWN.Process.__name__ == "SpawnProcess"
    tell_and_wait("worker")
"""
FAILING = """
import logging, multiprocessing, sys
from producers.generation.engines.vllm_group import EngineErrors, spawning_a_group

SPAWN = multiprocessing.get_context("spawn")
log = logging.getLogger("vllm")


def core():
    rank = SPAWN.Process(target=fail)
    rank.start()
    rank.join()
    try:
        raise RuntimeError("initialization failed. See stack trace for root cause.")
    except RuntimeError:
        log.exception("EngineCore failed to start.")
        raise


def fail():
    log.error("not the last")
    try:
        raise ValueError("No memory\\x1b[2J left\\nfor the cache")
    except ValueError:
        log.exception("WorkerProc failed to start.")


if __name__ == "__main__":
    errors = EngineErrors()
    before = errors.last()
    with spawning_a_group(errors):
        process = SPAWN.Process(target=core)
        process.start()
    process.join()
    print(repr(before), repr(errors.last()))
    errors.close()
    errors.close()
    print(repr(errors.last()))
"""
GONE_WITHIN_S = 2.0


@pytest.mark.skipif(sys.platform != "linux", reason="the kernel's part is Linux's")
def test_no_process_of_the_group_outlives_its_worker_though_it_is_killed(tmp_path: Path) -> None:
    program = tmp_path / "program.py"
    program.write_text(PROGRAM)
    told = {name: tmp_path / name for name in ("worker", "core", "rank")}
    place = {"PYTHONPATH": str(Path.cwd()), "CUDA_VISIBLE_DEVICES": "2,5"}
    with subprocess.Popen([sys.executable, str(program), str(tmp_path)], env=os.environ | place) as worker:
        try:
            until = time.monotonic() + 60
            while not all(path.exists() for path in told.values()) and time.monotonic() < until:
                time.sleep(0.05)
            found = {name: json.loads(path.read_text()) for name, path in told.items()}
            processes = [psutil.Process(found[name]["pid"]) for name in ("core", "rank")]
        finally:
            worker.send_signal(signal.SIGKILL)
    psutil.wait_procs(processes, timeout=GONE_WITHIN_S)
    assert not [one for one in processes if one.is_running() and one.status() != psutil.STATUS_ZOMBIE]
    # What is sent to the worker's group, such as a terminal's interrupt, does not reach them.
    assert found["core"]["group"] == found["rank"]["group"] == found["core"]["pid"] != found["worker"]["group"]
    for name in ("core", "rank"):
        assert found[name]["environment"]["CUDA_VISIBLE_DEVICES"] == "2,5"
        assert found[name]["environment"]["OMP_NUM_THREADS"] == "3"
    assert "VLLM_WORKER_MULTIPROC_METHOD" not in found["worker"]["environment"]


@pytest.mark.skipif(sys.platform != "linux", reason="the place of an unnamed file is Linux's")
def test_the_worker_knows_the_error_that_ended_a_rank_and_not_what_points_to_it(tmp_path: Path) -> None:
    program = tmp_path / "program.py"
    program.write_text(FAILING)
    place = os.environ | {"PYTHONPATH": str(Path.cwd())}
    done = subprocess.run([sys.executable, str(program)], env=place, capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stderr
    told, closed = done.stdout.splitlines()
    assert told == r"""'' 'ValueError: No memory\\x1b[2J left for the cache'"""
    assert closed == "''"
