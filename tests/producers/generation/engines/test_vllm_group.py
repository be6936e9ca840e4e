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
from streamrl.producers.generation.engines.vllm_group import EngineGroup

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
    with EngineGroup({"OMP_NUM_THREADS": "3"}).spawning():
        SPAWN.Process(target=core).start()
    SPAWN.Process(target=tell_and_wait, args=("other",)).start()
    tell_and_wait("worker")
"""
FAILING = """
import logging, multiprocessing, sys
from streamrl.producers.generation.engines.vllm_group import EngineGroup

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
    group = EngineGroup({})
    errors = group.errors
    before = errors.last()
    with group.spawning():
        process = SPAWN.Process(target=core)
        process.start()
    process.join()
    print(repr(before), repr(errors.last()))
    group.close()
    group.close()
    print(repr(errors.last()))
"""
TOGETHER = """
import json, logging, multiprocessing, os, sys, threading
from streamrl.producers.generation.engines.vllm_group import EngineGroup

SPAWN = multiprocessing.get_context("spawn")


def core(name, pipe):
    logging.getLogger("vllm").error("of %s", name)
    rank = SPAWN.Process(target=tell, args=(pipe, name))
    rank.start()
    rank.join()


def tell(pipe, name):
    pipe.send([name, os.environ.get("ENGINE"), os.getpgrp()])


if __name__ == "__main__":
    groups = {name: EngineGroup({"ENGINE": name}) for name in ("first", "second")}
    turns = {name: threading.Semaphore(0) for name in groups}
    found, pipes = {}, {name: SPAWN.Pipe() for name in (*groups, "neither")}

    def spawn(name):
        process = SPAWN.Process(target=core, args=(name, pipes[name][1]))
        process.start()
        found[name] = [process.pid, *pipes[name][0].recv()]
        process.join()

    def start(name, other):
        with groups[name].spawning():
            turns[other].release()
            turns[name].acquire()  # both are within
            spawn(name)
            turns[other].release()
            turns[name].acquire()  # both have spawned
            if name == "second":
                turns["second"].acquire()  # until the first, which entered first, has left
                spawn(name)
        turns[other].release()

    threads = [threading.Thread(target=start, args=pair) for pair in (("first", "second"), ("second", "first"))]
    for thread in threads:
        thread.start()
    spawn("neither")
    for thread in threads:
        thread.join(100)
    errors = {name: group.errors.last() for name, group in groups.items()}
    print(json.dumps([found, errors, "ENGINE" in os.environ, os.getpgrp()]))
"""
ENDED = """
import multiprocessing, time
from streamrl.producers.generation.engines.vllm_group import EngineGroup

if __name__ == "__main__":
    group = EngineGroup({})
    spawn = multiprocessing.get_context("spawn")
    with group.spawning():
        process = spawn.Process(target=time.sleep, args=(1000,))
        process.start()
        group.kill()
        process.join()
        try:
            spawn.Process(target=time.sleep, args=(1000,)).start()
        except Exception as error:
            print(process.exitcode, type(error).__name__, multiprocessing.active_children())
    group.close()
"""
KILLED = """
import multiprocessing, os, signal, tempfile
from streamrl.producers.generation.engines.vllm_group import EngineGroup

SPAWN = multiprocessing.get_context("spawn")


def core(pipe):
    rank = SPAWN.Process(target=leave, args=(pipe,))
    rank.start()
    rank.join()
    leave(pipe)


def leave(pipe):
    pipe.send(tempfile.mkstemp()[1])
    os.kill(os.getpid(), signal.SIGKILL)


if __name__ == "__main__":
    group = EngineGroup({})
    ours, theirs = SPAWN.Pipe()
    with group.spawning():
        SPAWN.Process(target=core, args=(theirs,)).start()
    left = [ours.recv(), ours.recv()]
    print([os.path.exists(path) for path in left])
    group.close()
    group.close()
    print(os.listdir(tempfile.gettempdir()))
"""
GONE_WITHIN_S = 2.0


@pytest.mark.processes
@pytest.mark.skipif(sys.platform != "linux", reason="the kernel's part is Linux's")
def test_no_process_of_the_group_outlives_its_worker_though_it_is_killed(tmp_path: Path) -> None:
    program = tmp_path / "program.py"
    program.write_text(PROGRAM)
    told = {name: tmp_path / name for name in ("worker", "core", "rank", "other")}
    place = {"PYTHONPATH": str(Path.cwd()), "CUDA_VISIBLE_DEVICES": "2,5", "TMPDIR": str(tmp_path)}
    with subprocess.Popen([sys.executable, str(program), str(tmp_path)], env=os.environ | place) as worker:
        try:
            until = time.monotonic() + 60
            while (
                not all(path.exists() for path in told.values()) and time.monotonic() < until and worker.poll() is None
            ):
                time.sleep(0.05)
            found = {name: json.loads(path.read_text()) for name, path in told.items()}
            processes = [psutil.Process(found[name]["pid"]) for name in ("core", "rank")]
            other = psutil.Process(found["other"]["pid"])
        finally:
            worker.send_signal(signal.SIGKILL)
    psutil.wait_procs(processes, timeout=GONE_WITHIN_S)
    assert not [one for one in processes if one.is_running() and one.status() != psutil.STATUS_ZOMBIE]
    # What is sent to the worker's group, such as a terminal's interrupt, does not reach them.
    assert found["core"]["group"] == found["rank"]["group"] == found["core"]["pid"] != found["worker"]["group"]
    for name in ("core", "rank"):
        assert found[name]["environment"]["CUDA_VISIBLE_DEVICES"] == "2,5"
        assert found[name]["environment"]["OMP_NUM_THREADS"] == "3"
    # What the worker starts besides is its own affair.
    assert found["other"]["group"] == found["worker"]["group"]
    assert found["other"]["environment"] == found["worker"]["environment"]
    assert other.is_running()
    other.kill()


@pytest.mark.processes
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


def output_of(program: str, directory: Path) -> str:
    """The program's output. Its temporary files are in ``directory/temporary``."""
    path, temporary = directory / "program.py", directory / "temporary"
    path.write_text(program)
    temporary.mkdir()
    place = os.environ | {"PYTHONPATH": str(Path.cwd()), "TMPDIR": str(temporary)}
    done = subprocess.run([sys.executable, str(path)], env=place, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    return done.stdout


@pytest.mark.processes
@pytest.mark.skipif(sys.platform != "linux", reason="the place of an unnamed file is Linux's")
def test_engines_that_start_together_do_not_mix(tmp_path: Path) -> None:
    """In threads of one process, each within while the other enters, spawns and leaves; and one of no engine."""
    found, errors, is_told, group = json.loads(output_of(TOGETHER, tmp_path))
    for name in ("first", "second"):
        pid, *told = found[name]
        assert told == [name, name, pid]  # the core leads, and its rank follows
        assert errors[name] == f"of {name}"
    assert found["neither"][1:] == ["neither", None, group]
    assert not is_told


@pytest.mark.processes
def test_an_engine_that_is_given_up_while_it_starts_has_no_processes(tmp_path: Path) -> None:
    assert output_of(ENDED, tmp_path) == f"{-signal.SIGKILL} EngineError []\n"


@pytest.mark.processes
def test_files_of_killed_processes_are_removed_with_their_group(tmp_path: Path) -> None:
    assert output_of(KILLED, tmp_path) == "[True, True]\n[]\n"
