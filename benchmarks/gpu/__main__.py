"""``python -m benchmarks.gpu``: trainer and engines on a GPU, with models of 1.5, 4 and 8 billion parameters.

Weights are random, of real models' sizes; or those of a directory (``--model``), without which the mismatch is of
logits smaller than a real model's. Every part is a process of its own, bounded in time, and what does not fit is a row
that says so. A trainer that does not fit is measured again with the optimizer's state in the processor's memory.
"""

import argparse
import json
import re
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

from benchmarks.conditions import conditions
from benchmarks.gpu.parts import add_arguments, has_vllm
from benchmarks.gpu.shapes import SHAPES, save
from streamrl.schemas.errors import UserError

RESULTS = Path(__file__).parents[1] / "results"
LIBRARIES = ("torch", "transformers", "vllm", "flash-attn")
MODELS = [name for name in SHAPES if name != "tiny"]
OPTIONS = ("device", "steps", "micro_batches", "rows", "length", "batches", "decode_steps")
"""Handed on to each part."""


def main(arguments: Sequence[str] | None = None) -> dict[str, Any]:
    """Measure as the arguments say, and write after every part.

    Raises:
        UserError: there is no such device.
    """
    parser = argparse.ArgumentParser(prog="python -m benchmarks.gpu", description=__doc__)
    parser.add_argument("--models", nargs="+", choices=list(SHAPES), default=MODELS)
    parser.add_argument("--model", type=Path, help="a model's directory, in the place of random weights")
    parser.add_argument("--parts", nargs="+", choices=("train", "decode", "mismatch"))
    parser.add_argument("--timeout", type=float, default=300.0, help="seconds of one part")
    parser.add_argument("--results", type=Path, help="by default results/gpu-<device>.json")
    add_arguments(parser)
    options = parser.parse_args(arguments)
    began, device = time.monotonic(), device_name(options.device)
    path = options.results or RESULTS / f"gpu-{re.sub('[^a-z0-9]+', '-', device.lower()).strip('-')}.json"
    result: dict[str, Any] = {
        "device": device,
        "options": {name: getattr(options, name) for name in OPTIONS},
        "rows": [],
    }
    for rows in measured(options):
        result["rows"] += rows
        result["conditions"] = conditions(began, 0, LIBRARIES, "make bench-gpu")
        path.write_text(json.dumps(result, indent=1) + "\n")
        print(*map(json.dumps, rows), sep="\n", flush=True)
    return result


def device_name(kind: str) -> str:
    """What the device calls itself.

    Raises:
        UserError: there is none.
    """
    import torch

    if kind == "cpu":
        return "CPU"
    if not torch.cuda.is_available():
        raise UserError("expected a CUDA device, got none; to try the benchmark out: --device cpu --models tiny")
    return str(torch.cuda.get_device_name())


def measured(options: argparse.Namespace) -> Iterator[list[dict[str, Any]]]:
    """The rows of each part of each model."""
    for name in [options.model.name] if options.model else options.models:
        with tempfile.TemporaryDirectory(prefix="streamrl-gpu-model-") as scratch:
            directory = options.model or save(SHAPES[name], Path(scratch), options.device)
            for part, more in _parts(options):
                rows = _run(part, directory, more, options)
                yield [{"model": name, **row} for row in rows]
                if part == "train" and not rows[0].get("fits", False):
                    yield [{"model": name, **row} for row in _run(part, directory, ["--optimizer-offload"], options)]


def _parts(options: argparse.Namespace) -> Iterator[tuple[str, list[str]]]:
    wanted = options.parts or ("train", "decode", "mismatch")
    engines = ("transformers", "vllm") if has_vllm() else ("transformers",)
    for part in wanted:
        if part == "train":
            yield part, []
        else:
            yield from ((part, ["--engine", engine]) for engine in engines)


def _run(part: str, model: Path, more: Sequence[str], options: argparse.Namespace) -> list[dict[str, Any]]:
    command = [sys.executable, "-m", "benchmarks.gpu.parts", part, str(model), *more]
    for name in OPTIONS:
        value = getattr(options, name)
        command += [f"--{name.replace('_', '-')}", *map(str, value if isinstance(value, list) else [value])]
    of = {"part": part} | ({"engine": more[1]} if more[:1] == ["--engine"] else {})
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=options.timeout, check=False)
    except subprocess.TimeoutExpired:
        return [of | {"fits": False, "said": f"no end within {options.timeout:g} s"}]
    if done.returncode:
        said = done.stderr.strip().splitlines() or ["nothing"]
        return [of | {"fits": False, "said": f"exit code {done.returncode}: {said[-1]}"}]
    rows: list[dict[str, Any]] = json.loads(done.stdout.strip().splitlines()[-1])
    return rows


if __name__ == "__main__":
    try:
        main()
    except UserError as error:
        print(f"error: {error}", file=sys.stderr)
        sys.exit(error.exit_code)
