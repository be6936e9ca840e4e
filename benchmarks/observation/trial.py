"""One demo that learns nothing, so that its completions stay as they are, and what a stretch of its steps takes."""

import json
import subprocess
import sys
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path

from benchmarks.spending import cpu_s_of

TIMEOUT_S = 300
MAX_STEPS = 10_000
"""More than is measured; the run is stopped."""
WARM_UP_STEPS = 15
"""In these a run fills its queues."""
SETTLE_STEPS = 20
"""Steps after viewers came that are not measured."""
LOOK_S = 0.05
STILL = "--training.learning_rate=1e-12"
METERED = "--metrics.port=29310"


@dataclass(frozen=True)
class Stretch:
    """Steps in which the same people looked. ``step_s``: mean; processor seconds of the run and its viewers a step."""

    step_s: float
    run_cpu_s: float
    viewers_cpu_s: float


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
        run_cpu_s, viewers_cpu_s = cpu_s_of([self.process.pid]), cpu_s_of(viewers)
        ended = self._reach(began + steps)
        run_cpu_s, viewers_cpu_s = cpu_s_of([self.process.pid]) - run_cpu_s, cpu_s_of(viewers) - viewers_cpu_s
        took = self._seen[ended - 1] - self._seen[began - 1]
        return Stretch(took / (ended - began), run_cpu_s / (ended - began), viewers_cpu_s / (ended - began))

    def settled(self) -> None:
        """Wait until those who came have read what was before them."""
        self._reach(self._steps() + SETTLE_STEPS)

    def warmed_up(self) -> None:
        """Wait for the first steps."""
        self._reach(WARM_UP_STEPS)

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
    where = (f"--run.name={name}", f"--run.directory={folder}", f"--training.max_steps={steps}", STILL)
    command = [sys.executable, "-m", "deploy.cli.app", "demo", "--seed", str(seed), *where, *overrides]
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
