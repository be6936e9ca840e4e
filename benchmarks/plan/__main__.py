"""``python -m benchmarks.plan``: ten configurations that nothing was tuned on, predicted and run for real."""

import argparse
import json
import os
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from benchmarks.plan.cases import JUDGED, TIME_SCALE, TUNING
from benchmarks.plan.trial import trial
from deploy.wiring.broker import broker_for

HERE = Path(__file__).parent
BOUND = 0.15


def main(arguments: Sequence[str] | None = None) -> list[dict[str, Any]]:
    """Measure as the arguments say."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.plan", description=__doc__)
    parser.add_argument("--wall-s", type=float, default=30.0, help="seconds that a run's steps should last, about")
    parser.add_argument("--only", nargs="*", type=int, help="numbers of the configurations, from 0")
    parser.add_argument("--tuning", action="store_true", help="the configurations that latencies are estimated from")
    parser.add_argument("--results", type=Path, default=HERE.parent / "results" / "plan.json")
    options = parser.parse_args(arguments)
    cases = TUNING if options.tuning else JUDGED
    chosen = [case for number, case in enumerate(cases) if options.only is None or number in options.only]
    rows = []
    with (
        tempfile.TemporaryDirectory(prefix="streamrl-bench-plan-") as scratch,
        broker_for(None, print, Path(scratch) / "kafka") as address,
    ):
        for case in chosen:
            began = time.monotonic()
            rows.append(trial(case, Path(scratch), address, options.wall_s))
            print(_line(rows[-1]), f"({time.monotonic() - began:.0f} s)", flush=True)
    worst = max(abs(row["error"]) for row in rows)
    print(f"worst error {worst:.1%}, bound {BOUND:.0%}; time scale {TIME_SCALE:g}; load now {os.getloadavg()[0]:.1f}")
    if not options.tuning and options.only is None:
        options.results.parent.mkdir(parents=True, exist_ok=True)
        options.results.write_text(json.dumps(rows, indent=1) + "\n")
    return rows


def _line(row: dict[str, Any]) -> str:
    return (
        f"{row['configuration']:45} predicted {row['predicted_trajectories_per_s']:7.3f} trajectories/s, "
        f"delivered {row['delivered_trajectories_per_s']:7.3f} ({row['error']:+.1%}); "
        f"waits {row['predicted_wait_s']:.0f} / {row['delivered_wait_s']:.0f} s; "
        f"staleness {row['predicted_max_staleness']} / {row['delivered_max_staleness']}"
    )


if __name__ == "__main__":
    main()
