"""One engine: profile its decoder, run the batch on it, and the same batch on the timeline. Runs as a process."""

import json
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from benchmarks.profile.emulated import finishes
from benchmarks.profile.workload import Trace, prompt_tokens
from planning import profiler as points
from planning.fitting import Fitted, fit_decode, fit_prefill
from planning.measuring import DecodeMeter, DecodePoint, PrefillPoint, endless_model
from planning.profiler import PROMPTS_AT_ONCE
from producers.generation.engines.factory import build_decoder
from producers.generation.engines.port import GenerationRequest
from producers.generation.engines.threaded import ActiveCompletion, Decoder
from producers.generation.settings import GenerationSettings
from schemas.profiles import DecodeSettings
from schemas.trajectories import SamplingParams

Clock = Callable[[], float]
CLOCKS: dict[str, Clock] = {"wall": time.perf_counter, "processor": time.process_time}
SLOTS = 16
STEPS = 16


def trial(engine: str, model: Path, clock: str, trace: Trace) -> dict[str, Any]:
    """The row of an engine by a clock; ``errors`` are shares of the real batch's makespan."""
    settings = GenerationSettings(engine=engine, max_num_seqs=SLOTS)  # type: ignore[arg-type]  # as chosen
    with tempfile.TemporaryDirectory() as scratch:
        decoder = build_decoder(settings, endless_model(str(model), Path(scratch) / "model"))
        facts = decoder.load()
        try:
            meter = DecodeMeter(decoder, facts, STEPS, CLOCKS[clock])
            before = measured(meter, trace)
            real = batch(decoder, facts.vocab_size, trace, CLOCKS[clock])
            decode, fitted = profiled([before, measured(meter, trace)])
        finally:
            decoder.close()
    emulated = finishes(decode, SLOTS, trace.sizes())
    return {
        "engine": engine,
        "clock": clock,
        **compared(real, emulated),
        **fit_errors(fitted),
        "decode": decode_row(decode),
    }


def measured(meter: DecodeMeter, trace: Trace) -> tuple[list[PrefillPoint], list[DecodePoint]]:
    """The points that `streamrl profile` measures of a decoder."""
    prompts = points.levels(trace.shortest_prompt, trace.longest_prompt, 3)
    contexts = points.levels(trace.shortest_prompt, trace.longest_prompt + trace.longest, 4)
    return list(meter.prefills_at(prompts, PROMPTS_AT_ONCE)), list(meter.steps_at(points.batches(SLOTS), contexts))


def profiled(
    rounds: Sequence[tuple[list[PrefillPoint], list[DecodePoint]]],
) -> tuple[DecodeSettings, list[Fitted]]:
    """The curve through the points of all rounds."""
    prefill_s, _ = fit_prefill([point for prefills, _ in rounds for point in prefills])
    table, context_s, fitted = fit_decode([point for _, steps in rounds for point in steps])
    return DecodeSettings(table=table, context_s_per_token=context_s, prefill_s_per_token=prefill_s), fitted


def batch(decoder: Decoder[Any], vocabulary: int, trace: Trace, clock: Clock) -> list[float]:
    """When each request was over on the real engine, in seconds after all were handed to it."""
    completions = [
        ActiveCompletion(
            GenerationRequest(
                f"profile/{number}",
                prompt_tokens(prompt, vocabulary, number),
                SamplingParams(max_completion_length=length),
            ),
            length,
            number,
        )
        for number, (prompt, length) in enumerate(trace.sizes())
    ]
    over: dict[ActiveCompletion, float] = {}
    began = clock()
    for completion in completions:
        decoder.add(completion)
    while decoder.busy:
        for completion in decoder.step():
            if completion.finish_reason is not None:
                over[completion] = clock() - began
    return [over[completion] for completion in completions]


def compared(real: Sequence[float], emulated: Sequence[float]) -> dict[str, float]:
    """Makespans in seconds and errors."""
    makespan = max(real)
    errors = sorted(abs(fake - true) / makespan for fake, true in zip(emulated, real, strict=True))
    return {
        "real_makespan_s": round(makespan, 4),
        "emulated_makespan_s": round(max(emulated), 4),
        "makespan_error": round(max(emulated) / makespan - 1, 4),
        "finish_error_mean": round(sum(errors) / len(errors), 4),
        "finish_error_p95": round(errors[int(0.95 * len(errors))], 4),
        "finish_error_max": round(errors[-1], 4),
    }


def fit_errors(fitted: Sequence[Fitted]) -> dict[str, float]:
    """How far the curve is from the steps it was fitted to."""
    errors = [abs(one.error) for one in fitted]
    return {"fit_error_mean": round(sum(errors) / len(errors), 4), "fit_error_max": round(max(errors), 4)}


def decode_row(decode: DecodeSettings) -> dict[str, Any]:
    """What was measured."""
    return {
        "table_ms": [[size, round(1e3 * seconds, 4)] for size, seconds in decode.table],
        "context_ns_per_token": round(1e9 * decode.context_s_per_token, 2),
        "prefill_us_per_token": round(1e6 * decode.prefill_s_per_token, 2),
    }


if __name__ == "__main__":
    engine, model, clock, requests, out = sys.argv[1:]
    Path(out).write_text(json.dumps(trial(engine, Path(model), clock, Trace(requests=int(requests)))))
