"""What the gateway adds to its engine, and how it compares with vLLM's own server: first tokens, and throughput.

The ways take turns within each round, another one first each time, so that all see one machine. All sample from one
model without an end token, one thread of the engine, all slots busy or one request alone.
"""

import http.client
import os
import socket
import statistics
import subprocess
import tempfile
import threading
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import uvloop

from benchmarks.gateway.asking import ENVIRONMENT, PROMPT, ROOT, Door, Part, ms, part, so_many
from benchmarks.gateway.models import MILLION, SampledModel
from benchmarks.gateway.parts import MODEL, POSITIONS

SLOTS, TOKENS, TOKENS_ALONE = 16, 64, 8
"""Tokens of a completion with all slots busy, and of one alone, of which only the first is looked at."""
VLLM = ROOT / ".venv-vllm"
Way = Callable[[int, int, int], tuple[list[float], float]]
"""So many requests, so many at once, of so many tokens: seconds to their first tokens, and tokens a second over all."""


def beside_engine(rounds: int, requests: int, limit_s: float) -> dict[str, Any]:
    """The transformers engine asked in its own process, and through the gateway."""
    with _engine_and_gateway("transformers", MILLION, limit_s) as (_, engine, gateway):
        rows = in_turns({"engine": directly(engine), "gateway": over_http(gateway.door)}, rounds, requests, TOKENS)
    return {"engine": "transformers", "model": MILLION.name, "slots": SLOTS, "tokens_each": TOKENS, "rows": rows}


def beside_vllm(rounds: int, requests: int, limit_s: float, sampled: SampledModel) -> dict[str, Any]:
    """VLLM asked in a worker's process, through the gateway, and by its own server, which has a vLLM of its own."""
    with (
        _engine_and_gateway("vllm", sampled, limit_s) as (model, engine, gateway),
        vllm_server(model, sampled.dtype, limit_s) as server,
    ):
        tokens = round(TOKENS * sampled.share)
        ways = {"engine": directly(engine), "gateway": over_http(gateway.door), "vllm_server": over_http(server)}
        rows = in_turns(ways, rounds, round(requests * sampled.share), tokens)
    by_way = {row["way"]: row for row in rows}
    ours, theirs = by_way["gateway"], by_way["vllm_server"]
    return {
        "engine": "vllm",
        "model": sampled.name,
        "slots": SLOTS,
        "tokens_each": tokens,
        "first_token_beside_server_ms_p50": round(ours["first_token_ms_p50"] - theirs["first_token_ms_p50"], 2),
        "throughput_beside_server": round(
            statistics.median(
                one / other for one, other in zip(ours["tokens_per_s"], theirs["tokens_per_s"], strict=True)
            ),
            3,
        ),
        "rows": rows,
    }


def in_turns(ways: Mapping[str, Way], rounds: int, requests: int, tokens: int) -> list[dict[str, Any]]:
    """A row a way; added milliseconds and ratios are to the first of them."""
    first: dict[str, list[float]] = {name: [] for name in ways}
    rates: dict[str, list[float]] = {name: [] for name in ways}
    names = [*ways]
    for way in ways.values():
        way(2, 1, TOKENS_ALONE)
        way(SLOTS, SLOTS, tokens)
    for number in range(rounds):
        turn = number % len(names)
        for name in (*names[turn:], *names[:turn]):
            first[name] += ways[name](requests, 1, TOKENS_ALONE)[0]
            rates[name].append(ways[name](4 * SLOTS, SLOTS, tokens)[1])
    base = names[0]
    medians = {name: statistics.median(values) for name, values in first.items()}
    ratios = {name: [one / other for one, other in zip(rates[name], rates[base], strict=True)] for name in names}
    return [
        {
            "way": name,
            "first_token_ms_p50": ms(medians[name]),
            "first_token_added_ms_p50": ms(medians[name] - medians[base]),
            "throughput_ratio": round(statistics.median(ratios[name]), 3),
            "throughput_ratios": [round(ratio, 3) for ratio in ratios[name]],
            "tokens_per_s": [round(rate) for rate in rates[name]],
        }
        for name in names
    ]


def directly(engine: Part) -> Way:
    """In the engine's own process."""

    def way(requests: int, at_once: int, tokens: int) -> tuple[list[float], float]:
        found = engine.ask({"requests": requests, "at_once": at_once, "prompt": [7] * PROMPT, "tokens": tokens})
        return found["first_s"], found["tokens_per_s"]

    return way


def over_http(door: Door) -> Way:
    """As streams, from this process."""

    def way(requests: int, at_once: int, tokens: int) -> tuple[list[float], float]:
        answers, rate = uvloop.run(so_many(door, requests, at_once, tokens))
        if answers.broken or set(answers.statuses) != {200}:
            raise SystemExit(f"expected whole answers of {door.address}, got {answers.statuses}")
        return answers.first_s, rate

    return way


@contextmanager
def _engine_and_gateway(engine: str, sampled: SampledModel, limit_s: float) -> Iterator[tuple[Path, Part, Part]]:
    """The directory of the model, the engine's process, and the gateway before it."""
    python = {"python": str(VLLM / "bin" / "python")} if engine == "vllm" else {}
    with tempfile.TemporaryDirectory() as scratch:
        model = Path(scratch) / "model"
        sampled.write(model)
        of_model = ("--model", model, "--dtype", sampled.dtype)
        with (
            part("engine", "--slots", SLOTS, "--engine", engine, *of_model, limit_s=limit_s, **python) as behind,
            part(
                *("gateway", behind.door.address, "--queued", 1000, "--wait-s", 60, "--model", model), limit_s=limit_s
            ) as gateway,
        ):
            yield model, behind, gateway


@contextmanager
def vllm_server(model: Path, dtype: str, limit_s: float) -> Iterator[Door]:
    """VLLM's own server with the settings that a worker's vLLM has: what ``vllm serve`` runs, which itself does not
    start in the build for CPUs, as it looks for a package of its own name.
    """
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    door = Door(f"http://127.0.0.1:{port}", more={"ignore_eos": True})
    command = [
        *(str(VLLM / "bin" / "python"), "-P", "-W", "ignore", "-m", "vllm.entrypoints.openai.api_server"),
        *("--model", str(model), "--served-model-name", MODEL, "--host", "127.0.0.1", "--port", str(port)),
        *("--dtype", dtype, "--max-num-seqs", str(SLOTS), "--max-model-len", str(POSITIONS), "--enforce-eager"),
        *("--kv-cache-memory-bytes", str(256 << 20), "--generation-config", "vllm", "--no-async-scheduling"),
        *("--max-num-batched-tokens", "8192", "--disable-log-stats", "--disable-uvicorn-access-log"),
    ]
    environment = {
        "VLLM_CPU_OMP_THREADS_BIND": "nobind",
        "TORCHDYNAMO_DISABLE": "1",
        "VLLM_NO_USAGE_STATS": "1",
        "VLLM_PLUGINS": "",
        "VLLM_LOGGING_LEVEL": "ERROR",
        "HF_HUB_OFFLINE": "1",
    }
    with (
        tempfile.TemporaryFile() as log,
        subprocess.Popen(command, env=os.environ | ENVIRONMENT | environment, stdout=log, stderr=log) as process,
    ):
        timer = threading.Timer(limit_s, process.kill)
        timer.start()
        try:
            while not _answers(port):
                if process.poll() is not None:
                    log.seek(0)
                    raise SystemExit(f"vLLM's server ended, or took too long: {log.read().decode()[-2000:]}")
                time.sleep(0.5)
            yield door
        finally:
            timer.cancel()
            process.terminate()


def _answers(port: int) -> bool:
    asked = http.client.HTTPConnection("127.0.0.1", port, timeout=2)
    try:
        asked.request("GET", "/health")
        return asked.getresponse().status == 200
    except OSError:
        return False
    finally:
        asked.close()
