"""`python -m tests.chaos.soak --minutes 30 --kill-every 20`."""

import argparse
import asyncio
import json
import shutil
import sys
import tempfile
from pathlib import Path

from tests.chaos.campaign.quiet import quiet_logs
from tests.chaos.soak.plot import write_plot
from tests.chaos.soak.soak import run_soak
from tests.pipeline.tiny_model import save_tiny_model

RESULTS = Path(__file__).parents[3] / "benchmarks" / "results"


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m tests.chaos.soak", description=__doc__)
    parser.add_argument("--minutes", type=float, default=30.0)
    parser.add_argument("--kill-every", type=float, default=20.0, help="seconds")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--output", type=Path, default=RESULTS / "soak.json", help="the picture goes beside it")
    arguments = parser.parse_args()
    root = Path(tempfile.mkdtemp(prefix="streamrl-soak-"))
    with quiet_logs():
        figures, samples = asyncio.run(
            run_soak(
                root,
                save_tiny_model(root / "model"),
                arguments.minutes,
                arguments.kill_every,
                arguments.seed,
                lambda line: print(line, flush=True),
            )
        )
    arguments.output.parent.mkdir(parents=True, exist_ok=True)
    arguments.output.write_text(json.dumps(figures, indent=1) + "\n")
    title = f"{arguments.minutes:g} minutes, a kill every {arguments.kill_every:g} s"
    write_plot(arguments.output.with_suffix(".png"), samples, title)
    print(json.dumps(figures, indent=1))
    if figures["problems"]:
        print(f"failed; the run's directory is {root}")
        return 1
    shutil.rmtree(root, ignore_errors=True)
    return 0


if __name__ == "__main__":
    sys.exit(main())
