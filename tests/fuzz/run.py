"""Coverage-guided fuzzing of every target: ``python -m tests.fuzz.run --seconds 60`` prints executions and memory.

Each target runs in a child process, because the fuzzer ends its process. An input that breaks a promise is kept
under ``--keep`` and named.
"""

import argparse
import re
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import NamedTuple

ROOT = Path(__file__).parents[2]
LARGEST_INPUT = 64 << 10
_EXECUTED = re.compile(r"stat::number_of_executed_units:\s*(\d+)")
_MEMORY = re.compile(r"memory: (\d+) KiB before, (\d+) KiB at most")


class Outcome(NamedTuple):
    """Of one target. ``failure`` is what the fuzzer said of an input that broke a promise."""

    target: str
    executions: int
    growth_kib: int
    failure: str | None


def fuzz(target: str, seconds: int, keep: Path) -> Outcome:
    """Fuzz one target in a child process for so long."""
    from tests.fuzz.corpus import write

    with tempfile.TemporaryDirectory() as corpus:
        write(Path(corpus), target)
        keep.mkdir(parents=True, exist_ok=True)
        command = [sys.executable, "-m", "tests.fuzz.guided", target, f"-max_total_time={seconds}", "-seed=1"]
        # libFuzzer takes the peak of the process that started it for its own; the targets measure memory themselves
        command += [f"-max_len={LARGEST_INPUT}", "-rss_limit_mb=0", "-print_final_stats=1"]
        command += [f"-artifact_prefix={keep}/{target}-", corpus]
        child = subprocess.run(
            command, cwd=ROOT, capture_output=True, text=True, errors="replace", timeout=seconds + 60, check=False
        )
    told = child.stdout + child.stderr
    executed, memory = _EXECUTED.search(told), _MEMORY.findall(told)
    growth = max((int(most) - int(before) for before, most in memory), default=0)
    failure = None if child.returncode == 0 and executed else told[-3000:]
    return Outcome(target, int(executed[1]) if executed else 0, growth, failure)


def main() -> int:
    """Fuzz all targets one after another, each for its share of the time."""
    from tests.fuzz.targets import TARGETS

    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--seconds", type=int, default=60)
    parser.add_argument("--keep", type=Path, default=Path(tempfile.gettempdir()) / "streamrl-fuzz")
    arguments = parser.parse_args()
    outcomes = [fuzz(target, max(1, arguments.seconds // len(TARGETS)), arguments.keep) for target in TARGETS]
    for outcome in outcomes:
        verdict = "ok" if outcome.failure is None else f"FAILED, inputs in {arguments.keep}\n{outcome.failure}"
        print(
            f"{outcome.target}: {outcome.executions} executions, "
            f"memory grew by {outcome.growth_kib / 1024:.1f} MiB: {verdict}"
        )
    print(f"all: {sum(outcome.executions for outcome in outcomes)} executions")
    return int(any(outcome.failure for outcome in outcomes))


if __name__ == "__main__":
    sys.exit(main())
