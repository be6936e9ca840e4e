"""``python -m benchmarks.profile``: profiles each engine, compares one batch on it and on the timeline, and says so."""

import argparse
import json
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from benchmarks.profile.trial import CLOCKS

HERE = Path(__file__).parent
ROOT = HERE.parents[1]
DOCS = ROOT / "docs" / "emulation.md"
MARKS = ("<!-- results -->", "<!-- end of results -->")
ONE_THREAD = {"OMP_NUM_THREADS": "1", "MKL_NUM_THREADS": "1", "TOKENIZERS_PARALLELISM": "false"}
POSITIONS = 2048


def main(arguments: Sequence[str] | None = None) -> list[dict[str, Any]]:
    """Measure as the arguments say."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.profile", description=__doc__)
    parser.add_argument("--engines", nargs="+", default=["vllm", "transformers"])
    parser.add_argument("--clocks", nargs="+", default=list(CLOCKS), choices=list(CLOCKS))
    parser.add_argument("--requests", type=int, default=96)
    parser.add_argument("--vllm-python", default=str(ROOT / ".venv-vllm" / "bin" / "python"))
    parser.add_argument("--results", type=Path, default=HERE.parent / "results" / "profile.json")
    parser.add_argument("--docs", type=Path, default=DOCS)
    options = parser.parse_args(arguments)
    pythons = {"vllm": options.vllm_python, "transformers": sys.executable}
    with tempfile.TemporaryDirectory(prefix="streamrl-bench-profile-") as scratch:
        model = _model(Path(scratch))
        rows = []
        for engine in options.engines:
            for clock in options.clocks:
                began = time.monotonic()
                rows.append(_trial(pythons[engine], engine, model, clock, options.requests))
                print(_line(rows[-1]), f"({time.monotonic() - began:.0f} s)", flush=True)
    options.results.parent.mkdir(parents=True, exist_ok=True)
    options.results.write_text(json.dumps(rows, indent=1) + "\n")
    _write_docs(options.docs, rows)
    return rows


def _model(directory: Path) -> Path:
    from streamrl.demo.warm_start import ModelShape, build_model, save

    save(build_model(ModelShape(max_position_embeddings=POSITIONS), seed=0), directory / "model")
    return directory / "model"


def _trial(python: str, engine: str, model: Path, clock: str, requests: int) -> dict[str, Any]:
    out = model.parent / f"{engine}-{clock}.json"
    command = [python, "-m", "benchmarks.profile.trial", engine, str(model), clock, str(requests), str(out)]
    done = subprocess.run(command, cwd=ROOT, env=os.environ | ONE_THREAD, capture_output=True, text=True, check=False)
    if done.returncode:
        raise RuntimeError(f"trial of {engine} failed: {done.stderr[-2000:]}")
    row: dict[str, Any] = json.loads(out.read_text())
    return row


def _line(row: dict[str, Any]) -> str:
    return (
        f"{row['engine']}, {row['clock']} time: makespan {row['real_makespan_s']:.2f} s, emulated "
        f"{row['emulated_makespan_s']:.2f} s ({row['makespan_error']:+.1%}); finish of a request off by "
        f"{row['finish_error_mean']:.1%} of it on average, {row['finish_error_max']:.1%} at most"
    )


def _write_docs(path: Path, rows: Sequence[dict[str, Any]]) -> None:
    """Put the table between the marks."""
    text = path.read_text()
    head, rest = text.split(MARKS[0])
    tail = rest.split(MARKS[1])[1]
    path.write_text(head + "\n".join([MARKS[0], "", *_table(rows), "", MARKS[1]]) + tail)


def _table(rows: Sequence[dict[str, Any]]) -> list[str]:
    lines = [
        "| engine | clock | decode step fitted within (mean, max) | real makespan | emulated | error "
        "| finish of a request (mean, p95, max) |",
        "|---|---|---|---|---|---|---|",
    ]
    return lines + [
        f"| {row['engine']} | {row['clock']} | {row['fit_error_mean']:.1%}, {row['fit_error_max']:.1%} "
        f"| {row['real_makespan_s']:.2f} s | {row['emulated_makespan_s']:.2f} s | {row['makespan_error']:+.1%} "
        f"| {row['finish_error_mean']:.1%}, {row['finish_error_p95']:.1%}, {row['finish_error_max']:.1%} |"
        for row in rows
    ]


if __name__ == "__main__":
    main()
