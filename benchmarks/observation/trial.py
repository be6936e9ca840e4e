"""One demo that learns nothing, so that its completions stay as they are, and what a stretch of its steps takes."""

import json
import subprocess
import sys
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path

from benchmarks.spending import broker_cpu_s_of, cpu_s_of

TIMEOUT_S = 300
MAX_STEPS = 10_000
"""More than is measured; the run is stopped."""
WARM_UP_STEPS = 15
"""In these a run fills its queues."""
SETTLE_STEPS = 20
"""Steps after viewers came that are not measured."""
LOOK_S = 0.05
STILL = "--training.learning_rate=1e-12"
UNJUDGED = "--evaluation.function=none"
"""What a demo has learned is not asked: it takes a minute before and after each."""
METERED = "--metrics.port=29310"


@dataclass(frozen=True)
class Stretch:
    """Steps in which the same people looked. ``step_s``: mean; processor seconds a step of the run, of the broker
    that is part of it, and of the viewers.
    """

    step_s: float
    run_cpu_s: float
    broker_cpu_s: float
    viewers_cpu_s: float

    @property
    def step_per_work(self) -> float:
        """Seconds of a step for each processor second of the run's processes but the broker.

        A shared machine works faster at one time than at another, and a step's processor seconds with it; their ratio
        does not change. What viewers take from the run, themselves and by what the broker does for them, changes it.
        """
        return self.step_s / (self.run_cpu_s - self.broker_cpu_s)


@dataclass
class Demo:
    """A run under way in ``path``."""

    path: Path
    process: "subprocess.Popen[bytes]"
    _seen: list[float] = field(default_factory=list)
    _read_to: int = 0

    def stretch(self, steps: int, viewers: Sequence[int] = ()) -> Stretch:
        """Measure the next steps, and what viewers with these process ids spend meanwhile.

        Raises:
            RuntimeError: the run ended or stands still.
        """
        began = self._reach(self._steps() + 1)
        before = self._spent(viewers)
        ended = self._reach(began + steps)
        spent = [after - then for after, then in zip(self._spent(viewers), before, strict=True)]
        took = self._seen[ended - 1] - self._seen[began - 1]
        return Stretch(took / (ended - began), *(seconds / (ended - began) for seconds in spent))

    def settled(self) -> None:
        """Wait until those who came have read what was before them."""
        self._reach(self._steps() + SETTLE_STEPS)

    def warmed_up(self) -> None:
        """Wait for the first steps."""
        self._reach(WARM_UP_STEPS)

    def _spent(self, viewers: Sequence[int]) -> tuple[float, float, float]:
        return cpu_s_of([self.process.pid]), broker_cpu_s_of(self.process.pid), cpu_s_of(viewers)

    def _reach(self, steps: int) -> int:
        """Wait for a step; the one that was reached."""
        deadline = time.monotonic() + TIMEOUT_S
        while self._steps() < steps:
            if self.process.poll() is not None or time.monotonic() > deadline:
                raise RuntimeError(f"expected step {steps} of {self.path.name}, got {len(self._seen)}")
            time.sleep(LOOK_S)
        return len(self._seen)

    def _steps(self) -> int:
        path = self.path / "metrics.jsonl"
        if path.exists():
            with path.open() as metrics:
                metrics.seek(self._read_to)
                whole, end, _ = metrics.read().rpartition("\n")
            self._read_to += len(whole + end)
            self._seen += [json.loads(line)["time"] for line in whole.splitlines()]
        return len(self._seen)


@contextmanager
def demo(folder: Path, name: str, steps: int, seed: int, overrides: Sequence[str]) -> Iterator[Demo]:
    """A run of that many steps, past its warm-up; it is stopped at the end.

    Raises:
        RuntimeError: it took no steps.
    """
    where = (f"--run.name={name}", f"--run.directory={folder}", f"--training.max_steps={steps}", STILL, UNJUDGED)
    command = [sys.executable, "-m", "streamrl.cli.app", "demo", "--seed", str(seed), *where, *overrides]
    with (
        (folder / f"{name}.log").open("w") as log,
        subprocess.Popen(command, stdout=log, stderr=subprocess.STDOUT) as process,
    ):
        try:
            run = Demo(folder / name, process)
            run.warmed_up()
            yield run
        finally:
            process.terminate()
            process.wait(TIMEOUT_S)
