"""One engine: profile its decoder, run batches on it, and the same batches on the timeline. Runs as a process.

Profile and batch take turns of a hundred steps, on two decoders of one model, and the clock of the one stands still
meanwhile: a shared machine's pace changes by half within seconds, which is no error of the model. Shorter turns would
count against the batch, whose first step of a turn finds the processor's caches full of the other model.
"""

import json
import math
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

from benchmarks.profile.emulated import finishes
from benchmarks.profile.workload import Trace, prompt_tokens
from streamrl.planning import profiler as points
from streamrl.planning.fitting import Fitted, fit_decode, fit_prefill
from streamrl.planning.measuring import DecodeMeter, DecodePoint, PrefillPoint, endless_model
from streamrl.planning.profiler import PROMPTS_AT_ONCE
from streamrl.producers.generation.engines.factory import build_decoder
from streamrl.producers.generation.engines.port import ActiveCompletion, Decoder, GenerationRequest
from streamrl.producers.generation.settings import GenerationSettings
from streamrl.schemas.profiles import DecodeSettings
from streamrl.schemas.trajectories import SamplingParams

Clock = Callable[[], float]
CLOCKS: dict[str, Clock] = {"wall": time.perf_counter, "processor": time.process_time}
SLOTS = 16
STEPS = 16
ROUNDS = 2
"""Of the profile's points, beside each batch."""
A_STEP = DecodeSettings(table=((1, 1.0),))
"""Takes one second whatever runs, so that a batch takes as many seconds as decode steps."""


def trial(engine: str, model: Path, clock: str, traces: Sequence[Trace]) -> dict[str, Any]:
    """The row of an engine by a clock; errors are shares of the real batch's makespan."""
    settings = GenerationSettings(engine=engine, max_num_seqs=SLOTS)
    with tempfile.TemporaryDirectory() as scratch:
        endless = endless_model(str(model), Path(scratch) / "model")
        sampling, measured = build_decoder(settings, endless), build_decoder(settings, endless)
        try:
            facts = sampling.load()
            meter = DecodeMeter(measured, facts, STEPS, CLOCKS[clock])
            measured.load()
            list(_points(meter, traces[0]))  # not counted: what engines do once, at their first steps
            rows = [_judged(sampling, meter, facts.vocab_size, trace, CLOCKS[clock]) for trace in traces]
        finally:
            sampling.close()
            measured.close()
    errors = [row["makespan_error"] for row in rows]
    return {
        "engine": engine,
        "clock": clock,
        "makespan_error_mean": round(sum(errors) / len(errors), 4),
        "makespan_error_worst": max(errors, key=abs),
        "finish_error_mean": round(sum(row["finish_error_mean"] for row in rows) / len(rows), 4),
        "finish_error_max": max(row["finish_error_max"] for row in rows),
        "fit_error_mean": round(sum(row["fit_error_mean"] for row in rows) / len(rows), 4),
        "batches": rows,
    }


def _judged(sampling: Decoder[Any], meter: DecodeMeter, vocabulary: int, trace: Trace, clock: Clock) -> dict[str, Any]:
    """Errors of one batch, of which a slice is run after each point of the profile."""
    batch = _RunningBatch(sampling, clock, trace, vocabulary)
    measured: list[PrefillPoint | DecodePoint] = []
    turns = ROUNDS * (1 + len(points.batches(SLOTS)))
    steps = math.ceil(max(finishes(A_STEP, SLOTS, trace.sizes())) / turns)
    for _ in range(ROUNDS):
        for some in _points(meter, trace):
            measured += some
            batch.advance(steps)
    while sampling.busy:
        batch.advance(steps)
    decode, fitted = profiled(measured)
    real = batch.finishes()
    return {
        "seed": trace.seed,
        **compared(real, finishes(decode, SLOTS, trace.sizes())),
        **fit_errors(fitted),
        **decode_row(decode),
    }


def _points(meter: DecodeMeter, trace: Trace) -> Iterator[Sequence[PrefillPoint | DecodePoint]]:
    """The points that `streamrl profile` measures of a decoder: prefills, then those of a batch size each time."""
    prompts = points.levels(trace.shortest_prompt, trace.longest_prompt, 3)
    contexts = points.levels(trace.shortest_prompt, trace.longest_prompt + trace.longest, 4)
    yield list(meter.prefills_at(prompts, PROMPTS_AT_ONCE))
    for batch in points.batches(SLOTS):
        yield list(meter.steps_at([batch], contexts))


def profiled(measured: Sequence[PrefillPoint | DecodePoint]) -> tuple[DecodeSettings, list[Fitted]]:
    """The curve through the points of all rounds."""
    prefill_s, prefill_s_per_token, _ = fit_prefill([point for point in measured if isinstance(point, PrefillPoint)])
    curve, fitted = fit_decode([point for point in measured if isinstance(point, DecodePoint)])
    prefill = {"prefill_s": prefill_s, "prefill_s_per_token": prefill_s_per_token}
    return curve.model_copy(update=prefill), fitted


class _RunningBatch:
    """The batch on the real engine, and when each of its requests was over by its own, interrupted clock."""

    def __init__(self, decoder: Decoder[Any], clock: Clock, trace: Trace, vocabulary: int) -> None:
        self._decoder, self._clock = decoder, clock
        self._spent = 0.0
        self._over: dict[ActiveCompletion, float] = {}
        self._completions = [
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
        for completion in self._completions:
            decoder.queue(completion)

    def advance(self, steps: int) -> None:
        """So many decode steps, or fewer if all requests are over."""
        began = self._clock()
        for _ in range(steps):
            if not self._decoder.busy:
                break
            for completion in self._decoder.step():
                if completion.finish_reason is not None:
                    self._over[completion] = self._spent + self._clock() - began
        self._spent += self._clock() - began

    def finishes(self) -> list[float]:
        """Seconds after all requests were handed over."""
        return [self._over[completion] for completion in self._completions]


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
        "padding_counts": decode.padding_counts,
        "context_ns_per_token": round(1e9 * decode.context_s_per_token, 2),
        "prefill_ms": round(1e3 * decode.prefill_s, 3),
        "prefill_us_per_token": round(1e6 * decode.prefill_s_per_token, 2),
    }


if __name__ == "__main__":
    engine, model, clock, requests, seeds, out = sys.argv[1:]
    asked = [Trace(requests=int(requests), seed=int(seed)) for seed in seeds.split(",")]
    Path(out).write_text(json.dumps(trial(engine, Path(model), clock, asked)))
