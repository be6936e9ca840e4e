"""What is measured of one model, each part in a process of its own (``python -m benchmarks.gpu.parts``): a device's
memory is free again after it, and what does not fit takes nothing else along.

- train: steps of the trainer's own policy on made-up samples, weights copied and exported beside the next step;
- decode: steps of an engine's decoder by batch size;
- mismatch: log-probabilities that an engine reports against those the trainer computes, by the precision of its head.
"""

import argparse
import asyncio
import importlib.util
import json
import statistics
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch

from streamrl.consumers.algorithms.losses import CompletionScorer
from streamrl.consumers.algorithms.settings import AlgorithmSettings
from streamrl.consumers.training.checkpoints.storage import open_storage
from streamrl.consumers.training.policy import ComputeThread, PolicyPaths, TrainedPolicy
from streamrl.consumers.training.settings import TrainingSettings
from streamrl.planning.measuring import DecodeMeter, synthetic
from streamrl.producers.generation.engines.factory import build_decoder, build_engine
from streamrl.producers.generation.engines.port import GenerationRequest
from streamrl.producers.generation.settings import GenerationSettings
from streamrl.schemas.errors import OutOfMemory, StreamRLError
from streamrl.schemas.identifiers import PolicyVersion
from streamrl.schemas.trajectories import SamplingParams

Row = dict[str, Any]
CONTEXT = 512
"""Tokens in the longest cache of a decode step."""
PROMPT, COMPLETION, SAMPLES = 32, 96, 32
"""Of the samples that engine and trainer are compared on."""


def train(model: Path, options: argparse.Namespace) -> list[Row]:
    """One row: tokens a second, the trainer's stall for weights as a share of a step, memory at its peak."""
    return [asyncio.run(_train(model, options))]


async def _train(model: Path, options: argparse.Namespace) -> Row:
    training = TrainingSettings(
        learning_rate=1e-6,
        dtype="bfloat16",
        device=options.device,
        gradient_checkpointing=True,
        optimizer_offload=options.optimizer_offload,
        max_grad_norm=1e9,  # else a step of made-up samples is refused
    )
    compute, exporter = ComputeThread(0), ComputeThread(0)
    steps, stalls, exports = list[float](), list[float](), list[float]()
    row = {"part": "train", "optimizer_offload": options.optimizer_offload, "tokens": options.rows * options.length}
    with tempfile.TemporaryDirectory(prefix="streamrl-gpu-") as scratch:
        paths = PolicyPaths(str(model), open_storage(Path(scratch) / "c", Path(scratch)), Path(scratch) / "w")
        exporting: asyncio.Task[float] | None = None
        try:
            policy = await compute(TrainedPolicy, paths, AlgorithmSettings(), training, options.length, None, 0)
            batch = synthetic(options.rows, options.length, policy.limits.vocabulary)
            for _ in range(options.steps + 1):
                began = time.monotonic()
                for _ in range(options.micro_batches):
                    await compute(policy.accumulate, batch)
                outcome = await compute(policy.finish_step, 1.0)
                if not outcome.applied:
                    raise StreamRLError(f"expected an optimizer step on made-up samples, got: {outcome.problem}")
                stepped = time.monotonic()
                if exporting is not None:  # in whose memory the copy is made
                    exports.append(await exporting)
                snapshot = await compute(policy.snapshot)
                exporting = asyncio.create_task(exporter(_exported, snapshot, PolicyVersion(1, policy.step)))
                steps.append(time.monotonic() - began)
                stalls.append(time.monotonic() - stepped)
            assert exporting is not None
            exports.append(await exporting)
        except (OutOfMemory, torch.OutOfMemoryError) as error:
            return row | {"fits": False, "said": str(error).splitlines()[0]}
        finally:
            exporter.close()
            compute.close()
    # The first step makes the optimizer's state.
    step_s, stall_s = statistics.median(steps[1:]), statistics.median(stalls[1:])
    return row | {
        "fits": True,
        "tokens_per_s": round(options.micro_batches * options.rows * options.length / step_s, 1),
        "step_s": round(step_s, 3),
        "stall_s": round(stall_s, 3),
        "stall_share": round(stall_s / step_s, 4),
        "export_s": round(statistics.median(exports), 3),
        "peak_bytes": _peak(options.device),
    }


def _exported(snapshot: Any, version: PolicyVersion) -> float:
    began = time.monotonic()
    snapshot.export(version, 0.0)
    snapshot.digests()
    return time.monotonic() - began


def _peak(device: str) -> int | None:
    return torch.cuda.max_memory_allocated() if device == "cuda" else None


def decode(model: Path, options: argparse.Namespace) -> list[Row]:
    """A row each batch size: tokens a second of decode steps alone."""
    rows = []
    for number in options.batches:
        row = {"part": "decode", "engine": options.engine, "batch": number, "context": CONTEXT}
        try:
            with _decoder(model, options, number) as meter:
                (point,) = meter.steps_at([number], [CONTEXT])
        except (StreamRLError, torch.OutOfMemoryError) as error:
            rows.append(row | {"fits": False, "said": str(error).splitlines()[0]})
            continue
        # vLLM's own processes have the memory there.
        peak = _peak(options.device) if options.engine == "transformers" else None
        per_s = round(number / point.mean_s, 1)
        rows.append(row | {"fits": True, "tokens_per_s": per_s, "step_s": round(point.seconds, 5), "peak_bytes": peak})
    return rows


def _generation(options: argparse.Namespace, number: int) -> GenerationSettings:
    return GenerationSettings(
        engine=options.engine,
        device=options.device,
        dtype="bfloat16",
        max_num_seqs=number,
        max_model_len=CONTEXT + 2 * options.decode_steps,
    )


@contextmanager
def _decoder(model: Path, options: argparse.Namespace, number: int) -> Iterator[DecodeMeter]:
    decoder = build_decoder(_generation(options, number), model)
    facts = decoder.load()
    try:
        yield DecodeMeter(decoder, facts, options.decode_steps)
    finally:
        decoder.close()


def mismatch(model: Path, options: argparse.Namespace) -> list[Row]:
    """A row each precision of the trainer's head: distances of log-probabilities, in nats."""
    engine, device = options.engine, options.device
    sampled = asyncio.run(_sampled(model, options))
    training = TrainingSettings(dtype="bfloat16", device=device)
    with tempfile.TemporaryDirectory(prefix="streamrl-gpu-") as scratch:
        paths = PolicyPaths(str(model), open_storage(Path(scratch) / "c", Path(scratch)), Path(scratch) / "w")
        policy = TrainedPolicy(paths, AlgorithmSettings(), training, COMPLETION, None, 0)
    rows = []
    for head in ("bfloat16", "float32"):
        scorer = CompletionScorer(policy.learner.model, float32_head=head == "float32")
        distances = torch.cat([_distances(scorer, device, *one) for one in sampled])
        rows.append(
            {"part": "mismatch", "engine": engine, "trainer_head": head, "tokens": distances.numel()}
            | {"mean_nats": round(distances.mean().item(), 6), "largest_nats": round(distances.max().item(), 6)}
        )
    return rows


async def _sampled(model: Path, options: argparse.Namespace) -> list[tuple[list[int], list[int], list[float]]]:
    engine = build_engine(_generation(options, SAMPLES), model)
    await engine.start()
    try:
        await engine.adopt(model, PolicyVersion(1, 0))
        return await asyncio.gather(*(_completion(engine, number) for number in range(SAMPLES)))
    finally:
        await engine.close()


async def _completion(engine: Any, number: int) -> tuple[list[int], list[int], list[float]]:
    prompt = [2 + (7 * number + 3 * index) % 300 for index in range(PROMPT)]
    request = GenerationRequest(str(number), prompt, SamplingParams(max_completion_length=COMPLETION, seed=number))
    tokens, logprobs = list[int](), list[float]()
    async for delta in engine.generate(request):
        tokens += delta.token_ids
        logprobs += delta.logprobs
    return prompt, tokens, logprobs


@torch.no_grad()
def _distances(
    scorer: CompletionScorer, device: str, prompt: Sequence[int], tokens: Sequence[int], logprobs: Sequence[float]
) -> torch.Tensor:
    ids = torch.tensor([[*prompt, *tokens]], device=device)
    mask = torch.zeros(ids.shape, device=device)
    mask[:, len(prompt) :] = 1.0
    with torch.autocast(device, torch.bfloat16):
        found = scorer(ids, mask, torch.ones(1, device=device))[0][0, len(prompt) :]
    return (found.float().cpu() - torch.tensor(list(logprobs))).abs()


PARTS: dict[str, Callable[[Path, argparse.Namespace], list[Row]]] = {
    "train": train,
    "decode": decode,
    "mismatch": mismatch,
}


def has_vllm() -> bool:
    """Whether its rows can be measured in this environment."""
    return importlib.util.find_spec("vllm") is not None


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Of a part, and of the benchmark, which hands them on."""
    parser.add_argument("--device", choices=("cuda", "cpu"), default="cuda")
    parser.add_argument("--steps", type=int, default=4, help="of the trainer, behind one that is not counted")
    parser.add_argument("--micro-batches", type=int, default=4, help="of a step")
    parser.add_argument("--rows", type=int, default=2, help="sequences of a micro-batch")
    parser.add_argument("--length", type=int, default=2048, help="tokens of a sequence")
    parser.add_argument("--batches", type=int, nargs="+", default=[1, 32, 128], help="sizes of decode steps")
    parser.add_argument("--decode-steps", type=int, default=64, help="timed at each size")


def main() -> None:
    """Measure one part, and print its rows as JSON in the last line."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.gpu.parts", description=__doc__)
    parser.add_argument("part", choices=PARTS)
    parser.add_argument("model", type=Path)
    parser.add_argument("--engine", choices=("transformers", "vllm"), default="transformers")
    parser.add_argument("--optimizer-offload", action="store_true")
    add_arguments(parser)
    options = parser.parse_args()
    rows = PARTS[options.part](options.model, options)
    print(json.dumps(rows))
    sys.stdout.flush()


if __name__ == "__main__":
    main()
