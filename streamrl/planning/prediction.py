"""Predicts what a configuration delivers: simulates its pipeline for some steps; also estimates its stages.

Rates and times are in emulated seconds, which equal wall-clock seconds if a real model samples.
"""

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from itertools import pairwise

from streamrl.planning.simulation import Latencies, SimulatedPipeline, SimulatedRun, shared_costs
from streamrl.producers.generation.engines.emulated import (
    EmulatedBatch,
    EmulatedSequence,
    FillerTokenizer,
    TokensSampled,
)
from streamrl.producers.generation.engines.length_trace import trace_length
from streamrl.producers.prompts.sources import PromptSource, open_source
from streamrl.schemas.identifiers import make_group_id
from streamrl.schemas.profiles import CoreCosts, DecodeCurve
from streamrl.schemas.trajectories import Prompt
from streamrl.settings.tree import Settings

DEFAULT_STEPS = 12
LOCAL_RUN = Latencies(
    order_s=0.035,
    sample_s=0.01,
    report_s=0.02,
    announce_s=0.01,
    fetch_s=0.02,
    heartbeat_s=0.02,
    trajectory_s=0.0003,
    step_s=0.01,
)
"""Wall-clock seconds between the processes of a run on one machine."""
LONGEST_STEP_S = 10.0
"""About the most virtual seconds of a step: each costs a heartbeat and several polls of every worker. A run with longer
steps is simulated at a faster pace, with rarer heartbeats and longer time-outs than in reality."""

LONGEST_BATCH_S = 1e9
"""More emulated seconds than any batch takes: a batch must be advanced to a finite time."""


@dataclass(frozen=True)
class Prediction:
    """The predicted performance, in emulated seconds. Rates count trained trajectories, after ``warm_up`` steps.

    ``step_ends``: when each step's weights were in the store. ``slots_busy``: mean share of all slots that decode.
    ``workers_idle``: share of the workers' time without anything to decode. ``trainer_busy``: share of the trainer's
    time at work. ``wait_for_batch_s``: mean seconds per step that the trainer waits. ``max_staleness``: age of the
    oldest trained token, in steps.
    """

    trajectories_per_s: float
    tokens_per_s: float
    step_s: float
    warm_up: int
    step_ends: tuple[float, ...]
    slots_busy: float
    workers_idle: float
    trainer_busy: float
    wait_for_batch_s: float
    max_staleness: int

    @property
    def steps(self) -> int:
        """Number of simulated steps."""
        return len(self.step_ends)


@dataclass
class CachedPrompts:
    """A ``PromptSource`` that makes each prompt only once for all simulations."""

    source: PromptSource
    _drawn: dict[int, tuple[Prompt, int]] = field(default_factory=dict)

    def prompt_at(self, position: int) -> tuple[Prompt, int]:
        """See ``PromptSource``."""
        if position not in self._drawn:
            self._drawn[position] = self.source.prompt_at(position)
        return self._drawn[position]


def predict(settings: Settings, *, steps: int | None = None) -> Prediction:
    """Simulate some optimizer steps of a run with these settings.

    Raises:
        DataError: the run's prompts or lengths cannot be read.
    """
    number = steps or min(settings.training.max_steps, DEFAULT_STEPS)
    return simulate(settings, CachedPrompts(open_source(settings.data, run_seed=settings.run.seed)), steps=number)


def time_scale(settings: Settings) -> float:
    """Emulated seconds per wall-clock second: 1 if a real model samples."""
    return settings.emulation.time_scale if settings.generation.engine == "emulated" else 1.0


def simulate(
    settings: Settings,
    source: PromptSource,
    *,
    steps: int,
    transfer_s: float = 0.0,
    training_devices: float = 1,
    cores: CoreCosts | None = None,
) -> Prediction:
    """Simulate ``steps`` steps and sum up. ``transfer_s``: emulated seconds of a weight transfer to the workers.

    ``cores``: those of one machine on which all processes compute; None: each computes on a device of its own.
    """
    scale = time_scale(settings)
    stages = StageEstimate(settings, source, 1)
    step_s = max(stages.generation_s(settings.run.workers), stages.training_s(training_devices))
    # ``pace``: emulated seconds per virtual second, so that a step lasts at most about ``LONGEST_STEP_S`` virtual ones.
    pace = max(scale, step_s / LONGEST_STEP_S)
    # Wall-clock seconds * scale = emulated ones, / pace = virtual ones; the transfer is in emulated seconds already.
    latencies = LOCAL_RUN.times(scale / pace)
    paced = settings.model_copy(
        update={
            "emulation": settings.emulation.model_copy(update={"time_scale": pace}),
            "training": settings.training.model_copy(update={"max_steps": steps}),
        }
    )
    pipeline = SimulatedPipeline(
        paced,
        latencies.with_transfer(transfer_s / pace),
        training_devices=training_devices,
        source=source,
        cores=cores,
    )
    return summed_up(pipeline.run(), paced)


def summed_up(run: SimulatedRun, settings: Settings) -> Prediction:
    """The prediction from a simulated run, without its first steps, which start with empty slots and no samples."""
    scale, loop = settings.emulation.time_scale, settings.loop
    start, *steps = run.steps
    # With a staleness bound of k the first k + 1 batches go out at once. In a short run half the steps count.
    warm_up = min(1 + loop.staleness_bound, len(steps) // 2)
    # ``run.steps`` starts with step 0: ``before`` is the mark at which the first counted step starts.
    counted, before, last = steps[warm_up:], run.steps[warm_up], steps[-1]
    seconds = (last.report.sent_at - before.report.sent_at) * scale
    groups = [group for step in counted for group in step.report.group_ids]
    training_s = (last.training_s - before.training_s) * scale
    worker_s = seconds * settings.run.workers
    return Prediction(
        trajectories_per_s=len(groups) * loop.num_generations / seconds,
        tokens_per_s=sum(run.completion_tokens[group] for group in groups) / seconds,
        step_s=seconds / len(counted),
        warm_up=warm_up,
        step_ends=tuple((step.report.sent_at - start.report.sent_at) * scale for step in steps),
        # Busy slot-seconds divided by all slot-seconds: workers * slots * seconds.
        slots_busy=(last.slot_s - before.slot_s) * scale / (worker_s * settings.generation.max_num_seqs),
        workers_idle=(last.idle_s - before.idle_s) * scale / worker_s,
        trainer_busy=training_s / seconds,
        wait_for_batch_s=max(0.0, seconds - training_s) / len(counted),
        max_staleness=int(max(step.report.metrics.get("off_policy/max", 0.0) for step in steps)),
    )


@dataclass
class StageEstimate:
    """Estimates each stage's seconds per step as if the other took no time, to choose what to simulate.

    It uses the lengths of ``steps`` steps' groups, the decode curve and the training costs, and nothing else.
    """

    settings: Settings
    source: PromptSource
    steps: int

    @cached_property
    def sequences(self) -> list[list[tuple[int, int]]]:
        """The (prompt tokens, completion tokens) of all samples, by step."""
        loop = self.settings.loop
        samples = [self._samples(position) for position in range(self.steps * loop.groups_per_step)]
        at = [step * loop.groups_per_step for step in range(self.steps + 1)]
        return [[one for group in samples[start:end] for one in group] for start, end in pairwise(at)]

    def _samples(self, position: int) -> list[tuple[int, int]]:
        loop, lengths = self.settings.loop, self.settings.emulation.lengths
        prompt, data_pass = self.source.prompt_at(position)
        group_id = make_group_id(prompt.prompt_id, data_pass)
        prompt_tokens = len(FillerTokenizer(lengths.prompt_characters_per_token).encode_prompt(prompt))
        completions = (trace_length(lengths, group_id, index, prompt) for index in range(loop.num_generations))
        return [(prompt_tokens, min(length, loop.max_completion_length)) for length in completions]

    def training_s(self, devices: float) -> float:
        """Mean seconds of a step's training, with its micro-batches shared by ``devices``."""
        # As if micro-batches could be shared evenly; the simulation deals them by rows.
        costs = shared_costs(self.settings.emulation.training, devices)
        lengths = [sum(sequence) for step in self.sequences for sequence in step]
        tokens, squares = sum(lengths), sum(length * length for length in lengths)
        if self.settings.training.packing == "shared":  # one sample of a group computes the prompt for all
            size = self.settings.loop.num_generations
            again = [prompt for step in self.sequences for number, (prompt, _) in enumerate(step) if number % size]
            tokens, squares = tokens - sum(again), squares - sum(prompt * prompt for prompt in again)
        # a * sum(n) + b * sum(n^2) + c * sum(n) / token budget, as if micro-batches were full and unpadded.
        seconds = (
            costs.forward_backward_s_per_token * tokens
            + costs.forward_backward_s_per_squared_token * squares
            + costs.forward_backward_s_per_micro_batch * tokens / self.settings.batching.token_budget
        )
        return seconds / self.steps + costs.optimizer_step_s + costs.export_s

    def generation_s(self, workers: int) -> float:
        """Mean seconds of a step's sampling.

        With a staleness bound of 0 a batch is sampled alone, to its last completion. With a bound of k, k more batches
        are sampled at the same time, and a step lasts at least as long as its tokens keep all slots busy.
        """
        bound = self.settings.loop.staleness_bound
        alone_s = sum(self._batch_s(step, workers) for step in self.sequences) / self.steps
        return max(alone_s / (bound + 1), self._full_slots_s(workers, bound) if bound else 0.0)

    def _full_slots_s(self, workers: int, bound: int) -> float:
        """Seconds of sampling a step's tokens, with as many slots busy all the time as staleness allows."""
        curve, slots = DecodeCurve(self.settings.emulation.decode), self.settings.generation.max_num_seqs
        # At most k + 1 batches are under way, divided among the workers.
        at_once = min(slots, math.ceil((bound + 1) * len(self.sequences[0]) / workers))
        every = [sequence for step in self.sequences for sequence in step]
        tokens = sum(completion for _, completion in every)
        # On average over its time, a completion has half its tokens in the cache. The mean is weighted by tokens, since
        # a completion of n tokens is in the batch for n steps.
        context = sum(completion * (prompt + completion / 2) for prompt, completion in every) / tokens
        prefill_s = sum(curve.prefill_s(prompt) for prompt, _ in every)
        return (curve.kept_full_s(tokens, at_once, context) + prefill_s) / workers / self.steps + curve.settings.adopt_s

    def _batch_s(self, sequences: Sequence[tuple[int, int]], workers: int) -> float:
        """Seconds until a worker has sampled its even share of a batch, the longest first."""
        slots = self.settings.generation.max_num_seqs
        decode = self.settings.emulation.decode.model_copy(update={"chunk_tokens": 0})
        # Every ``workers``-th of the sorted completions, from the longest on: the share of the worker that ends last.
        share = sorted(sequences, key=lambda sequence: -sequence[1])[::workers]
        return max(ends_alone(share, DecodeCurve(decode), slots)) + decode.adopt_s


def ends_alone(sequences: Iterable[tuple[int, int]], curve: DecodeCurve, slots: int) -> list[float]:
    """The end times of one worker's completions, all queued at time 0; each is given as (prompt, completion) tokens.

    They get slots in this order. ``curve``: of an engine that returns a completion only when it has ended.
    """
    batch: EmulatedBatch[int] = EmulatedBatch(curve, slots, 0)
    waiting = [EmulatedSequence(*tokens) for tokens in sequences]
    for sequence in waiting:
        batch.arrive(sequence, 0.0)
    events = batch.advance(LONGEST_BATCH_S)
    ended = {event.sequence: event.at for event in events if isinstance(event, TokensSampled) and event.is_over}
    return [ended[sequence] for sequence in waiting]
