"""``python -m benchmarks.profile``: profiles each engine, compares batches on it and on the timeline, and says so."""

import argparse
import json
import sys
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from benchmarks.commands import ROOT, output_of
from benchmarks.conditions import conditions
from benchmarks.profile.trial import CLOCKS, ROUNDS, SLOTS
from benchmarks.small_model import build, save
from streamrl.settings.placement import ProcessPlace

HERE = Path(__file__).parent
SEEDS = (5, 6, 7)
"""Of the batches."""
POSITIONS = 2048
LIBRARIES = ("torch", "transformers", "vllm", "numpy")


def main(arguments: Sequence[str] | None = None) -> list[dict[str, Any]]:
    """Measure as the arguments say."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.profile", description=__doc__)
    parser.add_argument("--engines", nargs="+", default=["vllm", "transformers"])
    parser.add_argument("--clocks", nargs="+", default=list(CLOCKS), choices=list(CLOCKS))
    parser.add_argument("--requests", type=int, default=96, help="of a batch")
    parser.add_argument("--seeds", nargs="+", type=int, default=list(SEEDS), help="one batch for each")
    parser.add_argument("--vllm-python", default=str(ROOT / ".venv-vllm" / "bin" / "python"))
    parser.add_argument("--results", type=Path, default=HERE.parent / "results" / "profile.json")
    options, started = parser.parse_args(arguments), time.monotonic()
    pythons = {"vllm": options.vllm_python, "transformers": sys.executable}
    with tempfile.TemporaryDirectory(prefix="streamrl-bench-profile-") as scratch:
        model = _model(Path(scratch))
        rows = []
        for engine in options.engines:
            for clock in options.clocks:
                began = time.monotonic()
                rows.append(_trial(pythons[engine], engine, model, clock, options))
                print(_line(rows[-1]), f"({time.monotonic() - began:.0f} s)", flush=True)
    options.results.parent.mkdir(parents=True, exist_ok=True)
    asked = {"requests": options.requests, "slots": SLOTS, "profile_rounds_beside_a_batch": ROUNDS}
    where = conditions(started, options.seeds, LIBRARIES, "make bench-profile") | asked
    options.results.write_text(json.dumps({"conditions": where, "rows": rows}, indent=1) + "\n")
    return rows


def _model(directory: Path) -> Path:
    return save(build(POSITIONS), directory / "model")


def _trial(python: str, engine: str, model: Path, clock: str, options: argparse.Namespace) -> dict[str, Any]:
    out = model.parent / f"{engine}-{clock}.json"
    seeds = ",".join(map(str, options.seeds))
    command = [
        python,
        "-m",
        "benchmarks.profile.trial",
        engine,
        str(model),
        clock,
        str(options.requests),
        seeds,
        str(out),
    ]
    output_of(command, ProcessPlace().environment)
    row: dict[str, Any] = json.loads(out.read_text())
    return row


def _line(row: dict[str, Any]) -> str:
    return (
        f"{row['engine']}, {row['clock']} time: makespan off by {row['makespan_error_mean']:+.1%} on average, "
        f"{row['makespan_error_worst']:+.1%} at worst of {len(row['batches'])} batches; finish of a request off by "
        f"{row['finish_error_mean']:.1%} of it on average, {row['finish_error_max']:.1%} at most"
    )


if __name__ == "__main__":
    main()
