"""A short real run with its own broker: samples its processes from outside, and counts their processor time."""

import json
import re
import signal
import subprocess
import sys
import time
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

import psutil

from benchmarks.commands import STREAMRL
from benchmarks.step.phases import OTHER, samples_by_phase
from streamrl.observability.run_state.pace import spent_by_all
from streamrl.observability.usage import IDLE

PY_SPY = Path(sys.executable).with_name("py-spy")
LOOKS = "Sampling process"
"""What py-spy prints when it has found the processes."""
LOOK_S = 0.05
PATIENCE_S = 900.0
"""Seconds in which a run must take its next step, on a machine whose cores others use."""
WRITE_S = 60.0
"""Seconds in which the profiler must write what it has seen."""
BROKER, RUN, ENDED = "broker", "run", "ended processes"
_ROLE = re.compile(r"-m streamrl(?:\.cli\.app)? (\S+)")


@dataclass(frozen=True)
class Spent:
    """Processor seconds of a process. ``threads``: of its living threads, by their numbers."""

    name: str
    seconds: float
    threads: Mapping[int, float]

    def since(self, before: "Spent") -> "Spent":
        """What was spent after an earlier look."""
        threads = {number: seconds - before.threads.get(number, 0.0) for number, seconds in self.threads.items()}
        return Spent(self.name, self.seconds - before.seconds, threads)


NOTHING = Spent("", 0.0, {})


@dataclass(frozen=True)
class Window:
    """What was spent from one moment of a run to another, ``steps`` optimizer steps later.

    ``cpu_s``: by process and phase. ``idle_s``: of the machine's processors, unused. ``began`` and ``ended``:
    seconds since the epoch.
    """

    steps: int
    began: float
    ended: float
    cpu_s: Mapping[tuple[str, str], float]
    idle_s: float

    @property
    def seconds(self) -> float:
        """Its length on the clock."""
        return self.ended - self.began


@dataclass(frozen=True)
class Recorded:
    """``start``: from the command to the end of the first step. ``steady``: of the steps after step ``first``."""

    start: Window
    steady: Window
    first: int


def record(command: Sequence[str], directory: Path, metrics: Path, warm_up: int, steps: int, rate: int) -> Recorded:
    """Run a command for some steps, and stop it. The first ``warm_up`` lines of ``metrics`` do not count.

    ``rate``: samples a second of each process. ``directory``: where the command is started, and where its log and what
    the profiler writes are put.

    Raises:
        RuntimeError: the run ended before, or the profiler could not look into it.
    """
    with (directory / "run.log").open("w") as log:
        run = subprocess.Popen(
            [*STREAMRL, *command],
            cwd=directory,
            stdin=subprocess.DEVNULL,
            stdout=log,
            stderr=log,
            start_new_session=True,
        )
    try:
        start = _Sampling.begin(run, directory / "start.txt", rate, waits=False)
        _await_steps(run, metrics, 1, directory)
        recorded_start = start.end(1)
        _await_steps(run, metrics, warm_up, directory)
        steady = _Sampling.begin(run, directory / "steady.txt", rate, waits=True)
        first = _steps_in(metrics)
        _await_steps(run, metrics, first + steps, directory)
        taken = _steps_in(metrics) - first
        return Recorded(recorded_start, steady.end(taken), first)
    finally:
        run.send_signal(signal.SIGINT)
        with suppress(subprocess.TimeoutExpired):
            run.wait(PATIENCE_S)
        run.kill()
        run.wait()


def _await_steps(run: "subprocess.Popen[bytes]", metrics: Path, steps: int, directory: Path) -> None:
    until = time.monotonic() + PATIENCE_S
    while _steps_in(metrics) < steps:
        if run.poll() is not None or time.monotonic() > until:
            said = (directory / "run.log").read_text()[-2000:]
            raise RuntimeError(f"expected {steps} steps of the run, got too few (exit code {run.poll()}): {said}")
        time.sleep(LOOK_S)


def _steps_in(metrics: Path) -> int:
    return metrics.read_bytes().count(b"\n") if metrics.exists() else 0


@dataclass
class _Sampling:
    run: "subprocess.Popen[bytes]"
    out: Path
    profiler: "subprocess.Popen[str]"
    began: float
    before: dict[int, Spent]
    idle_before: float

    @classmethod
    def begin(cls, run: "subprocess.Popen[bytes]", out: Path, rate: int, *, waits: bool) -> "_Sampling":
        """``waits``: the window begins when the profiler looks; else at once, and its first moments are not sampled."""
        options = ("--nonblocking", "--subprocesses", "--threads", "--full-filenames", "--format", "raw")
        command = [str(PY_SPY), "record", "--pid", str(run.pid), *options, "--rate", str(rate), "--output", str(out)]
        # In a session of its own, as the run's processes are: Linux shares processors out by session.
        profiler = subprocess.Popen(
            command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, start_new_session=True
        )
        if waits:
            assert profiler.stdout is not None
            # It first reads the symbols of all processes, which takes seconds.
            while (line := profiler.stdout.readline()) and LOOKS not in line:
                pass
        return cls(run, out, profiler, time.time(), spent_by_process(run.pid), spent_by_all(IDLE).free)

    def end(self, steps: int) -> Window:
        after, ended, idle = spent_by_process(self.run.pid), time.time(), spent_by_all(IDLE).free
        self.profiler.send_signal(signal.SIGINT)
        said, _ = self.profiler.communicate(timeout=WRITE_S)
        if not self.out.exists():
            raise RuntimeError(f"expected py-spy to see the run's processes, got: {said.strip()[-500:]}")
        spent = [each.since(self.before.get(pid, NOTHING)) for pid, each in after.items()]
        cpu_s = by_phase(spent, samples_by_phase(self.out.read_text()))
        return Window(steps, self.began, ended, cpu_s, idle - self.idle_before)


def spent_by_process(root: int) -> dict[int, Spent]:
    """What a run's command and all that live below it have spent so far; as 0, what those spent that ended."""
    found: dict[int, Spent] = {}
    ended = 0.0
    with suppress(psutil.Error):
        process = psutil.Process(root)
        for each in (process, *process.children(recursive=True)):
            with suppress(psutil.Error):  # it has ended in the meantime
                times, threads = each.cpu_times(), each.threads()
                name = RUN if each.pid == root else name_of(each.name(), each.cmdline())
                by_thread = {thread.id: thread.user_time + thread.system_time for thread in threads}
                found[each.pid] = Spent(name, times.user + times.system, by_thread)
                ended += times.children_user + times.children_system
    return found | {0: Spent(ENDED, ended, {})}


def name_of(program: str, command: Sequence[str]) -> str:
    """What a process is called in the table, by its program and its command line."""
    if program == "java":
        return BROKER
    text = " ".join(command)
    if "streamrl.producers.rewards.child" in text:
        return "rewards"
    if (role := _ROLE.search(text)) is None:
        return program
    return role[1]


def by_phase(spent: Iterable[Spent], samples: Mapping[int, Counter[str]]) -> dict[tuple[str, str], float]:
    """Seconds by process and phase: each thread's seconds, by the shares of its samples.

    Threads without Python code, such as those of OpenMP, work for the busiest thread that has samples. A process
    without samples, such as the broker, has one phase.
    """
    found: dict[tuple[str, str], float] = {}
    for process in spent:
        threads = {number: seconds for number, seconds in process.threads.items() if number in samples}
        parts = [(samples[number], seconds) for number, seconds in threads.items()]
        busiest = max(parts, key=lambda part: part[1], default=(Counter({_only_phase(process.name): 1}), 0.0))[0]
        parts.append((busiest, max(0.0, process.seconds - sum(threads.values()))))
        for seen, seconds in parts:
            for phase, count in seen.items():
                key = (process.name, phase)
                found[key] = found.get(key, 0.0) + seconds * count / seen.total()
    return found


def _only_phase(name: str) -> str:
    return BROKER if name == BROKER else OTHER


def step_means(metrics: Path, first: int, last: int) -> dict[str, float]:
    """Means of a run's figures over the steps after ``first`` up to ``last``."""
    rows = [json.loads(line) for line in metrics.read_text().splitlines()[first:last]]
    names = {name for row in rows for name, value in row.items() if isinstance(value, int | float)}
    return {name: sum(row.get(name, 0.0) for row in rows) / len(rows) for name in names}
