"""What audits of a running demo cost its trainer: steps beside one audit after another, and steps beside none."""

import statistics
import subprocess
import sys
import threading
import time
from collections.abc import Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass, field
from pathlib import Path

from benchmarks.observation.trial import MAX_STEPS, demo
from benchmarks.paired import Pair

STRETCH_STEPS = 20
NAME = "protocol-bench-audited"


@dataclass
class Audits:
    """``took_s``: of each audit that came to its end, from the start of the command.

    Raises:
        RuntimeError: the books do not balance.
    """

    command: Sequence[str]
    took_s: list[float] = field(default_factory=list)

    @contextmanager
    def following_one_another(self) -> "Iterator[Future[None]]":
        """One after the other until the block ends; the last is cut short. Done before that if one failed."""
        over = threading.Event()
        with ThreadPoolExecutor(1) as pool:
            audits = pool.submit(self._audit_until, over)
            try:
                yield audits
            finally:
                over.set()
                audits.result()

    def _audit_until(self, over: threading.Event) -> None:
        while not over.is_set():
            began = time.monotonic()
            with subprocess.Popen(self.command, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL) as audit:
                while audit.poll() is None and not over.wait(0.02):
                    pass
                if audit.poll() is None:
                    audit.kill()
                    return
            if audit.returncode:
                raise RuntimeError(f"expected a run that balances, got exit code {audit.returncode}")
            self.took_s.append(time.monotonic() - began)


@dataclass(frozen=True)
class Beside:
    """``steps``: beside audits and beside none. ``audit_s``: of the last audits, which read most, until their end."""

    steps: list[Pair]
    audit_s: float
    audits: int


def audits_beside_a_demo(folder: Path, seed: int, pairs: int) -> Beside:
    """Measure a demo that learns nothing, so that its completions stay as they are.

    Raises:
        RuntimeError: it took no steps, or its books did not balance.
    """
    steps: list[Pair] = []
    with demo(folder, NAME, MAX_STEPS, seed, ()) as run:
        audits = Audits([sys.executable, "-m", "streamrl.cli.app", "audit", "--run", str(run.path), "--json"])
        for number in range(pairs):
            took = {}
            for audited in (True, False) if number % 2 else (False, True):
                with audits.following_one_another() if audited else nullcontext():
                    took[audited] = run.stretch(STRETCH_STEPS).step_s
            steps.append(Pair(took[False], took[True]))
        # They take what the run leaves: on a busy machine none may have come to its end within a stretch.
        with audits.following_one_another() as going:
            while not audits.took_s and not going.done():
                run.stretch(1)
    return Beside(steps, statistics.median(audits.took_s[-5:]), len(audits.took_s))
