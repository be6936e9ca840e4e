"""What a configuration will deliver: a simulation of its pipeline, summed up. Pure but for the prompts it reads."""

import math
import random
from collections.abc import Sequence
from dataclasses import dataclass, field, replace

from planning.simulation import Latencies, Pipeline, Plant, Trace, Work
from producers.dispatch.scheduler import PendingPrompt
from producers.generation.engines.length_trace import trace_length
from producers.lengths.predictor import LengthPredictor
from producers.lengths.startup import build_predictor
from producers.prompts.sources import PromptSource, open_source
from schemas.identifiers import make_group_id
from schemas.profiles import DecodeCurve
from schemas.trajectories import Prompt
from settings.tree import Settings, decode_curve

# The groups that a run will generate: its own prompts, their emulated or recorded lengths, and what is predicted.


@dataclass
class RunSupply:
    """A ``Supply``. ``recorded``: lengths seen in an earlier run, drawn from in place of the emulated trace."""

    settings: Settings
    recorded: Sequence[int] = ()
    source: PromptSource | None = None
    predictor: LengthPredictor = field(init=False)
    _drawn: dict[int, tuple[Prompt, int]] = field(default_factory=dict)

    def __post_init__(self) -> None:
        self._source = self.source or open_source(self.settings.data, run_seed=self.settings.run.seed)
        self.predictor = build_predictor(self.settings.lengths, self.settings.loop, self.length_of)

    def afresh(self, settings: Settings) -> "RunSupply":
        """The same prompts for other settings, nothing learnt yet."""
        fresh = RunSupply(settings, self.recorded, self._source)
        fresh._drawn = self._drawn
        return fresh

    def draft(self, position: int) -> PendingPrompt:
        """The prompt at a position with the estimate of now."""
        if position not in self._drawn:
            self._drawn[position] = self._source.prompt_at(position)
        prompt, data_pass = self._drawn[position]
        group_id = make_group_id(prompt.prompt_id, data_pass)
        return PendingPrompt(position, prompt, group_id, self.predictor.predict(prompt, group_id))

    def work(self, draft: PendingPrompt) -> Work:
        """What sampling it takes."""
        per_token = self.settings.emulation.lengths.prompt_characters_per_token
        samples = range(self.settings.loop.num_generations)
        return Work(
            group_id=draft.group_id,
            position=draft.position,
            prompt_tokens=max(1, math.ceil(len(draft.prompt.text) / per_token)),
            lengths=tuple(self.length_of(draft.group_id, index, draft.prompt) for index in samples),
        )

    def length_of(self, group_id: str, sample_index: int, prompt: Prompt) -> int:
        """Tokens of a sample's completion, within the limit."""
        if self.recorded:
            length = random.Random(f"{group_id}/{sample_index}").choice(self.recorded)
        else:
            length = trace_length(self.settings.emulation.lengths, group_id, sample_index, prompt)
        return min(length, self.settings.loop.max_completion_length)


DEFAULT_STEPS = 12
LOCAL_RUN = Latencies(
    turn_s=0.005,
    order_s=0.03,
    sample_s=0.01,
    announce_s=0.05,
    report_s=0.02,
    adopted_s=0.02,
    trajectory_s=0.0003,
    step_s=0.01,
)
"""Wall-clock seconds between the processes of a run on one machine."""


@dataclass(frozen=True)
class Prediction:
    """Emulated seconds throughout; rates are of what was trained, after ``warm_up`` steps.

    ``step_ends``: when each step's weights were in the store; ``slots_busy``: mean share of all slots that decode;
    ``workers_idle``: share of the workers' time with nothing to decode; ``trainer_busy``: of its time, at work;
    ``wait_for_batch_s``: of the trainer, mean per step; ``max_staleness``: oldest trained token, in steps.
    """

    trajectories_per_s: float
    tokens_per_s: float
    step_s: float
    steps: int
    warm_up: int
    step_ends: tuple[float, ...]
    slots_busy: float
    workers_idle: float
    trainer_busy: float
    wait_for_batch_s: float
    max_staleness: int


def predict(settings: Settings, *, steps: int | None = None) -> Prediction:
    """Simulate some optimizer steps of a run with these settings.

    Raises:
        DataError: its prompts or lengths cannot be read.
    """
    taken = steps or min(settings.training.max_steps, DEFAULT_STEPS)
    return simulate(plant_of(settings, taken), RunSupply(settings))


def plant_of(settings: Settings, steps: int) -> Plant:
    """The plant that the settings describe, with an emulation's latencies in its own seconds."""
    emulation, scale = settings.emulation, time_scale(settings)
    decode = emulation.decode.model_copy(update={"chunk_tokens": 0})
    return Plant(
        loop=settings.loop,
        dispatch=settings.dispatch,
        workers=settings.run.workers,
        slots=settings.generation.max_num_seqs,
        curve=DecodeCurve(decode),
        dispatch_curve=decode_curve(settings),
        time_scale=scale,
        costs=emulation.training,
        batching=settings.batching,
        checkpoint_every=settings.training.checkpoint_every,
        steps=steps,
        latencies=replace(LOCAL_RUN, **{name: value * scale for name, value in vars(LOCAL_RUN).items()}),
    )


def time_scale(settings: Settings) -> float:
    """Emulated seconds in one of the wall clock: 1 where a real model samples."""
    return settings.emulation.time_scale if settings.generation.engine == "emulated" else 1.0


def simulate(plant: Plant, supply: RunSupply) -> Prediction:
    """Run the plant and sum up."""
    return summed_up(Pipeline(plant, supply).run(), plant)


def summed_up(trace: Trace, plant: Plant) -> Prediction:
    """Figures of the steps after the first ones, which find the slots empty and nothing generated ahead."""
    warm_up = min(1 + plant.loop.staleness_bound, len(trace.steps) // 2)
    counted = trace.steps[warm_up:]
    seconds = _since(warm_up, [step.at for step in trace.steps])
    trajectories = sum(len(work.lengths) for step in counted for work in step.groups)
    tokens = sum(work.completion_tokens for step in counted for work in step.groups)
    worker_seconds = seconds * plant.workers
    return Prediction(
        trajectories_per_s=trajectories / seconds,
        tokens_per_s=tokens / seconds,
        step_s=seconds / len(counted),
        steps=len(trace.steps),
        warm_up=warm_up,
        step_ends=tuple(step.at for step in trace.steps),
        slots_busy=_since(warm_up, trace.slot_seconds) / (worker_seconds * plant.slots),
        workers_idle=_since(warm_up, trace.idle_seconds) / worker_seconds,
        trainer_busy=sum(step.training_s for step in counted) / seconds,
        wait_for_batch_s=sum(step.waiting_s for step in counted) / len(counted),
        max_staleness=max(step.staleness for step in trace.steps),
    )


def _since(warm_up: int, sums: Sequence[float]) -> float:
    return sums[-1] - (sums[warm_up - 1] if warm_up else 0.0)
