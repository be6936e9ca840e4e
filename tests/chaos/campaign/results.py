"""The results file: valid after every single run, so that a campaign that was cut short still tells what it found."""

import json
import os
import statistics
import time
from collections import defaultdict
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from benchmarks.conditions import conditions
from streamrl.bus.embedded.jars import KAFKA_VERSION
from tests.chaos.checking.recovery import Recovery
from tests.chaos.runs.chaos_run import Outcome

PACKAGES = ("aiokafka", "torch", "transformers", "obstore")


@dataclass
class Results:
    """Sums over everything done so far; ``write`` puts them into the file."""

    path: Path
    seeds: int = 0
    runs: int = 0
    runs_failed: int = 0
    lost: int = 0
    trained_twice: int = 0
    audit_failures: int = 0
    produced: int = 0
    trained: int = 0
    skipped: dict[str, int] = field(default_factory=lambda: defaultdict(int))
    crash_points: int = 0
    bit_equal: int = 0
    failures: list[dict[str, Any]] = field(default_factory=list)
    recoveries: list[Recovery] = field(default_factory=list)
    simulation: dict[str, Any] = field(default_factory=dict)
    stops: dict[str, Any] = field(default_factory=dict)
    began: float = field(default_factory=time.monotonic)
    first_seed: int = 0
    command: str = "make chaos"

    def add_run(self, outcome: Outcome) -> None:
        self.runs += 1
        self.runs_failed += not outcome.passed
        self.lost += sum(findings.lost for findings in outcome.ledgers)
        self.trained_twice += sum(findings.trained_twice for findings in outcome.ledgers)
        self.audit_failures += bool(outcome.audit_problems)
        # Of the run's own ledger: an instance's is of the same records.
        self.produced += outcome.findings.produced
        self.trained += outcome.findings.trained
        for reason, count in outcome.findings.skipped.items():
            self.skipped[reason] += count
        self.recoveries += outcome.recoveries
        if not outcome.passed:  # no path of this machine in a file that is published
            self.failures.append(
                {
                    "plan": str(outcome.plan),
                    "reproduce": outcome.plan.command,
                    "problems": [text.replace(str(outcome.directory), "RUN") for text in outcome.all_problems[:10]],
                }
            )
        self.write()

    def add_crash_point(self, name: str, problems: list[str], bit_equal: bool) -> None:
        self.crash_points += 1
        self.bit_equal += bit_equal
        if problems:
            self.failures.append({"plan": f"crash point: {name}", "problems": problems[:10]})
        self.write()

    def add_crash_point_baseline(self, problems: list[str]) -> None:
        if problems:
            self.failures.append({"plan": "undisturbed trainer on the static topic", "problems": problems[:10]})

    def add_simulation(self, found: Mapping[str, Any]) -> None:
        """``found``: what ``tests.simulation`` says of some seeds; the last call's rate is kept."""
        self.seeds += found["seeds"]
        self.lost += found["lost"]
        self.trained_twice += found["trained_twice"]
        self.audit_failures += found["audit_failures"]
        failed = self.simulation.get("failed", 0) + len(found["failures"])
        self.simulation = {"seeds_per_minute": found["per_minute"], "failed": failed}
        self.failures += [
            {
                "plan": f"simulated seed {failure['seed']}, {failure['scenario']}",
                "reproduce": failure["command"],
                "problems": [f"{failure['rule']}: {failure['detail']}"],
            }
            for failure in found["failures"][:20]
        ]
        self.write()

    def add_stops(self, found: Mapping[str, Mapping[str, Any]]) -> None:
        """``found``: by role, how many moments it was ended at, and what was wrong afterwards."""
        self.stops |= found
        self.failures += [
            {"plan": f"stops of {role}", "problems": list(of_role["problems"])}
            for role, of_role in found.items()
            if of_role["bad_ends"]
        ]
        self.write()

    def recovery_s(self) -> dict[str, dict[str, float | int]]:
        """By fault: seconds from its end to the next optimizer step."""
        found: dict[str, list[float]] = defaultdict(list)
        for each in self.recoveries:
            if each.step_s is not None:
                found[each.fault].append(each.step_s)
        return {
            fault: {"median": round(statistics.median(values), 2), "max": round(max(values), 2), "n": len(values)}
            for fault, values in sorted(found.items())
        }

    def write(self) -> None:
        content = {
            "seeds": self.seeds,
            "runs": self.runs,
            "runs_failed": self.runs_failed,
            "lost": self.lost,
            "trained_twice": self.trained_twice,
            "audit_failures": self.audit_failures,
            "trajectories": {"produced": self.produced, "trained": self.trained, "skipped": dict(self.skipped)},
            "recovery_s": self.recovery_s(),
            "crash_points": self.crash_points,
            "bit_equal": self.bit_equal,
            "simulation": self.simulation,
            "stops": self.stops,
            "failures": self.failures,
            "conditions": conditions(self.began, self.first_seed, PACKAGES, self.command, Kafka=KAFKA_VERSION),
        }
        self.path.parent.mkdir(parents=True, exist_ok=True)
        draft = self.path.with_suffix(".draft")
        draft.write_text(json.dumps(content, indent=1) + "\n")
        os.replace(draft, self.path)
