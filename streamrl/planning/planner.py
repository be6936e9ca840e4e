"""`streamrl plan`: chooses which devices generate, which train, and with which settings; shows the choice as text.

Output lengths may come from a recorded run. Allocation and settings follow from stage times in closed form; their
performance comes from simulations of the real roles (``prediction``).
"""

import multiprocessing
import os
import signal
import tempfile
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ProcessPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass, replace
from functools import cache
from pathlib import Path
from typing import Literal

import numpy as np

from streamrl.bus.embedded.process import die_with_parent
from streamrl.inspection.lengths import recorded_completions
from streamrl.planning.prediction import LOCAL_RUN, CachedPrompts, Prediction, StageEstimate, simulate, time_scale
from streamrl.producers.generation.engines.length_trace import LengthTraceSettings
from streamrl.producers.prompts.sources import open_source
from streamrl.schemas.errors import DataError
from streamrl.schemas.profiles import CoreCosts, DeviceProfile, TrainingCosts
from streamrl.settings.tree import Settings

# Output lengths of a recorded run, expected again.


def recorded_lengths(place: Path | None) -> Sequence[int]:
    """Tokens of each completion of a run or export; empty if ``place`` is None.

    Raises:
        UserError: ``place`` is neither a run nor an export, or the run's topics cannot be found.
        DataError: it has no completions.
    """
    if place is None:
        return ()
    lengths = [completion.length for completion in recorded_completions([place], print) if completion.length]
    if not lengths:
        raise DataError(f"expected finished completions in {place}, got none")
    return lengths


# How many devices generate and how many train (StreamRL, 2025, algorithm 1). Pure; stage times are functions, in
# seconds.
# Invariant: no_split_within_the_budget_is_faster.

StageSeconds = Callable[[int], float]
"""Gives the best seconds of a stage for one step on a number of devices; more devices never take longer."""
StepSeconds = Callable[[float, float], float]
"""Gives the seconds of a step from the seconds of its generation and of its training."""


@dataclass(frozen=True)
class Split:
    """The number of devices of each stage, and the seconds of each stage and of a step."""

    workers: int
    trainers: int
    generate_s: float
    train_s: float
    step_s: float


def one_site(
    devices: int,
    generate_s: StageSeconds,
    train_s: StageSeconds,
    composed: StepSeconds,
    candidates: int = 1,
    most_trainers: int | None = None,
) -> list[Split]:
    """The fastest splits of up to ``devices`` equal devices, the fastest first; among equals, those with fewer devices.

    Devices that do not make a step faster, or that no trainer can use, stay unused.
    """
    found: list[Split] = []
    for workers in range(1, devices):
        for trainers in range(1, min(devices - workers, most_trainers or devices) + 1):
            # In every mode a step takes at least as long as its training. So a split whose training exceeds the worst
            # step kept is dropped before the expensive estimate, which samples batches in emulation.
            bound = found[-1].step_s if len(found) >= candidates else float("inf")
            training = train_s(trainers)
            if training > bound:
                continue
            generating = generate_s(workers)
            split = Split(workers, trainers, generating, training, composed(generating, training))
            found = sorted([*found, split], key=_rank)[:candidates]
    return found


def two_sites(
    workers: int, trainers: int, generate_s: StageSeconds, train_s: StageSeconds, composed: StepSeconds
) -> Split:
    """A split of devices that can only generate and others that can only train.

    The faster stage gets only as many devices as it needs.
    """
    generating, training = generate_s(workers), train_s(trainers)
    # As many devices as make both stages take nearly the same time; ties go to fewer devices.
    if generating < training:
        workers = min(range(1, workers + 1), key=lambda number: (abs(generate_s(number) - training), number))
    else:
        trainers = min(range(1, trainers + 1), key=lambda number: (abs(train_s(number) - generating), number))
    generating, training = generate_s(workers), train_s(trainers)
    return Split(workers, trainers, generating, training, composed(generating, training))


def _rank(split: Split) -> tuple[float, int]:
    return split.step_s, split.workers + split.trainers


# Settings that follow from measured times: the duration of a step in each mode, and the size of micro-batches. Pure.

Mode = Literal["synchronous", "stream", "one_step_async", "trajectory_async"]
MODES: tuple[Mode, ...] = ("synchronous", "stream", "one_step_async", "trajectory_async")
OVERHEAD = 0.02
"""Largest share of a micro-batch's time for launching it."""


def composed(mode: Mode, hand_over_s: float) -> StepSeconds:
    """A mode's function for the seconds of a step. ``hand_over_s``: from its end until workers sample with its weights.

    Only asynchronous modes hide both the shorter stage and the hand-over; stream hides at best the shorter stage.
    """
    match mode:
        case "synchronous":
            return lambda generate_s, train_s: generate_s + train_s + hand_over_s
        case "stream":
            return lambda generate_s, train_s: max(generate_s, train_s) + hand_over_s
        case "one_step_async" | "trajectory_async":
            return lambda generate_s, train_s: max(generate_s, train_s, hand_over_s)


def token_budget(costs: TrainingCosts, longest: int, configured: int) -> int:
    """The smallest power of two of tokens that fits the longest sequence and hides a micro-batch's launch cost.

    If a micro-batch has no launch cost, ``configured`` stays.
    """
    if not costs.forward_backward_s_per_micro_batch or not costs.forward_backward_s_per_token:
        return configured
    launch = costs.forward_backward_s_per_micro_batch / costs.forward_backward_s_per_token
    # launch / (launch + tokens) = OVERHEAD, solved for tokens; ``launch``: tokens that take as long as the launch.
    wanted = max(float(longest), launch * (1 - OVERHEAD) / OVERHEAD)
    return 1 << max(0, (int(wanted) - 1).bit_length())  # 2 ** ceil(log2(wanted)), in whole numbers


# The search: splits are ranked by estimates of their stages; the best ones are simulated, and their settings varied. It
# starts no run.

STEPS = 6
"""Number of simulated steps after those that fill the pipeline."""
CANDIDATES = 3
WORTH = 0.02
"""A gain in throughput below this share is not worth more staleness or fewer slots."""
MOST_TRAJECTORIES = 256
"""Most trajectories in a simulated step, so that a simulation takes seconds. A larger pipeline is simulated in part:
fewer workers, with their share of the groups and of the training. The rates are extrapolated to the whole. The part has
very long completions less often, which favours modes that wait for the last completion of a batch."""
SECONDS_AN_HOUR = 3600.0
BITS = 8e9  # bits of a gigabyte


@dataclass(frozen=True)
class Site:
    """Devices of one type at one place: their number, the profile of one, and the price of one per hour."""

    devices: int
    profile: DeviceProfile | None = None
    price: float = 0.0


TRAINER_DEVICES = 64
"""Most devices on which `streamrl trainer` can train one model (``training.ranks``)."""


@dataclass(frozen=True)
class Demand:
    """What to plan for. ``training``: None if trainers use the same devices as generation.

    ``weights_gb``: gigabytes that cross the link at each step. ``most_trainers``: most devices that can share the
    training; None: any number, as in a study.
    """

    settings: Settings
    generation: Site
    training: Site | None = None
    link_gbps: float | None = None
    weights_gb: float = 0.0
    recorded: Sequence[int] = ()
    most_trainers: int | None = TRAINER_DEVICES


@dataclass(frozen=True)
class Choice:
    """A mode with its best split and settings. ``cost``: of a million trajectories, in the unit of the prices.

    ``simulated_share``: share of the pipeline that was simulated; the prediction is extrapolated from it.
    """

    mode: Mode
    split: Split
    max_staleness: int
    max_num_seqs: int
    token_budget: int
    prediction: Prediction
    cost: float
    simulated_share: float


@dataclass
class Planner:
    """Plans for one demand, with one process per mode."""

    demand: Demand

    def choices(
        self, modes: Sequence[Mode] = MODES, progress: Callable[[str], None] = lambda line: None
    ) -> list[Choice]:
        """The best choice for each mode.

        Raises:
            DataError: prompts or lengths cannot be read.
        """
        for mode in modes:
            progress(f"looking for the best split in mode {mode}")
        with with_recorded_lengths(self.demand.settings, self.demand.recorded) as settings:
            demand = replace(self.demand, settings=settings)
            if len(modes) == 1:
                return [ModeSearch.of(demand, modes[0]).best()]
            # Processes, not threads: a simulation is pure Python on one core, and the modes are independent.
            with ProcessPoolExecutor(min(len(modes), os.cpu_count() or 1), initializer=_leave_signals) as pool:
                try:
                    return list(pool.map(_best, [demand] * len(modes), modes))
                except BaseException:
                    # Otherwise leaving the block would wait for simulations whose results are not needed.
                    for child in multiprocessing.active_children():
                        child.terminate()
                    raise


def _leave_signals() -> None:
    """Prepare a process of the pool: it ignores Ctrl-C, which the command handles; other signals end it at once."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    for number in (signal.SIGTERM, signal.SIGHUP):
        signal.signal(number, signal.SIG_DFL)
    die_with_parent()


# At module level, so that it can be pickled for another process.
def _best(demand: Demand, mode: Mode) -> Choice:
    return ModeSearch.of(demand, mode).best()


@contextmanager
def with_recorded_lengths(settings: Settings, recorded: Sequence[int]) -> Iterator[Settings]:
    """The settings for this block, with emulated lengths drawn from the recorded ones, if there are any."""
    if not recorded:
        yield settings
        return
    with tempfile.TemporaryDirectory(prefix="streamrl-plan-") as scratch:
        path = Path(scratch) / "lengths.npy"
        np.save(path, np.array(recorded, dtype=np.int64))
        drawn = LengthTraceSettings(
            source="file",
            path=path,
            seed=settings.run.seed,
            prompt_characters_per_token=settings.emulation.lengths.prompt_characters_per_token,
        )
        yield _with(settings, "emulation", lengths=drawn)


def measured_settings(settings: Settings, generation: DeviceProfile | None, training: DeviceProfile | None) -> Settings:
    """The settings with measured costs instead of emulated ones."""
    emulation: dict[str, object] = {}
    if generation is not None:
        decode, cores = generation.decode, generation.cores
        # Prefills come once a trajectory, too, and decode steps wait for them.
        prefill_s = decode.prefill_s + (cores.worker_s_per_trajectory if cores is not None else 0.0)
        emulation["decode"] = decode.model_copy(update={"prefill_s": prefill_s})
    if training is not None:
        emulation["training"] = training.training
    return _with(settings, "emulation", **emulation)


@dataclass
class ModeSearch:
    """The search for the best split and settings in one mode. ``settings``: with measured costs."""

    demand: Demand
    mode: Mode
    settings: Settings
    source: CachedPrompts

    @classmethod
    def of(cls, demand: Demand, mode: Mode) -> "ModeSearch":
        """The search for a mode, with measured costs, and with micro-batches of a good size."""
        settings = _with(demand.settings, "loop", mode=mode)
        trainer = demand.training or demand.generation
        settings = measured_settings(settings, demand.generation.profile, trainer.profile)
        longest = settings.loop.max_prompt_length + settings.loop.max_completion_length
        budget = token_budget(settings.emulation.training, longest, settings.batching.token_budget)
        settings = _with(settings, "batching", token_budget=budget)
        return cls(demand, mode, settings, CachedPrompts(open_source(settings.data, run_seed=settings.run.seed)))

    def best(self) -> Choice:
        """The split with the highest throughput, and the fewest slots and least staleness that keep this throughput."""
        settings = self.settings
        split, prediction = max(
            ((split, self._simulate(settings, split)) for split in self._splits()),
            key=lambda pair: pair[1].trajectories_per_s,
        )
        # Slots first, so that staleness bounds are tried with the final number of slots.
        settings, prediction = self._reduce_slots(settings, split, prediction)
        settings, prediction = self._reduce_staleness(settings, split, prediction)
        return Choice(
            mode=self.mode,
            split=split,
            max_staleness=settings.loop.staleness_bound,
            max_num_seqs=settings.generation.max_num_seqs,
            token_budget=settings.batching.token_budget,
            prediction=prediction,
            cost=self._cost(split, prediction),
            simulated_share=self._simulated_workers(split) / split.workers,
        )

    def _splits(self) -> list[Split]:
        stages = StageEstimate(self.settings, self.source, STEPS)
        hand_over_s = LOCAL_RUN.fetch_s * time_scale(self.settings) + self._transfer_s
        at_site = composed(self.mode, hand_over_s + self.settings.emulation.decode.adopt_s)
        # Cached, since each number of workers is combined with each number of trainers.
        generate_s, train_s, demand = cache(stages.generation_s), cache(stages.training_s), self.demand
        if demand.training is not None:
            trainers = min(demand.training.devices, demand.most_trainers or demand.training.devices)
            return [two_sites(demand.generation.devices, trainers, generate_s, train_s, at_site)]
        return one_site(demand.generation.devices, generate_s, train_s, at_site, CANDIDATES, demand.most_trainers)

    def _reduce_slots(self, settings: Settings, split: Split, best: Prediction) -> tuple[Settings, Prediction]:
        """Use fewer slots if that is faster, as it may be if a step waits for its longest completion."""
        slots = settings.generation.max_num_seqs
        while slots > 1:
            slots //= 2
            fewer = _with(settings, "generation", max_num_seqs=slots)
            prediction = self._simulate(fewer, split)
            if prediction.trajectories_per_s < best.trajectories_per_s * (1 + WORTH):
                break
            settings, best = fewer, prediction
        return settings, best

    def _reduce_staleness(self, settings: Settings, split: Split, best: Prediction) -> tuple[Settings, Prediction]:
        """Use the smallest staleness bound that costs next to no throughput."""
        if settings.loop.mode != "trajectory_async":
            return settings, best
        for bound in range(1, settings.loop.max_staleness):
            fresher = _with(settings, "loop", max_staleness=bound)
            prediction = self._simulate(fresher, split)
            if prediction.trajectories_per_s >= best.trajectories_per_s * (1 - WORTH):
                return fresher, prediction
        return settings, best

    def _simulate(self, settings: Settings, split: Split) -> Prediction:
        """The prediction from a proportional part of the pipeline, extrapolated to the whole."""
        workers, groups = self._simulated_workers(split), settings.loop.groups_per_step
        part = _with(settings, "run", workers=workers)
        part = _with(part, "loop", groups_per_step=max(1, round(groups * workers / split.workers)))
        # The trainer's devices shrink in proportion too: otherwise fewer groups would be trained too fast.
        share = part.loop.groups_per_step / groups
        prediction = simulate(
            part,
            self.source,
            steps=STEPS + settings.loop.staleness_bound,  # the pipeline takes so many more steps to fill
            transfer_s=self._transfer_s,
            training_devices=split.trainers * share,
            cores=self._cores(share),
        )
        return replace(
            prediction,
            trajectories_per_s=prediction.trajectories_per_s / share,
            tokens_per_s=prediction.tokens_per_s / share,
        )

    def _cores(self, share: float) -> CoreCosts | None:
        """The cores of the machine, if all of the run is on one, and a share of it is simulated."""
        profile = self.demand.generation.profile
        if profile is None or profile.cores is None or self.demand.training is not None:
            return None
        return profile.cores.share(share)

    def _simulated_workers(self, split: Split) -> int:
        loop = self.settings.loop
        most = MOST_TRAJECTORIES / (loop.groups_per_step * loop.num_generations)
        return max(1, min(split.workers, round(split.workers * most)))

    @property
    def _transfer_s(self) -> float:
        """Seconds of a weight transfer: the measured time, plus the time on the link between the sites."""
        demand = self.demand
        seconds = demand.generation.profile.weight_transfer_s if demand.generation.profile else 0.0
        if demand.link_gbps:
            seconds += demand.weights_gb * BITS / (demand.link_gbps * 1e9)
        return seconds

    def _cost(self, split: Split, prediction: Prediction) -> float:
        generation, training = self.demand.generation, self.demand.training or self.demand.generation
        hourly = split.workers * generation.price + split.trainers * training.price
        # Seconds for a million trajectories, times the price of all devices per second.
        return 1e6 / prediction.trajectories_per_s * hourly / SECONDS_AN_HOUR


def best_of(choices: Sequence[Choice]) -> Choice:
    """The choice with the least staleness among those with nearly the highest throughput."""
    most = max(choice.prediction.trajectories_per_s for choice in choices)
    # Twice ``WORTH``: each choice may already have given up ``WORTH`` for less staleness within its own mode.
    return min(
        (choice for choice in choices if choice.prediction.trajectories_per_s >= most * (1 - 2 * WORTH)),
        key=lambda choice: choice.max_staleness,
    )


def _with(settings: Settings, section: str, **values: object) -> Settings:
    return settings.model_copy(update={section: getattr(settings, section).model_copy(update=values)})


HEAD = (
    f"{'mode':17} {'gen : train':>11} {'slots':>6} {'stale':>6} {'traj/s':>9} {'tokens/s':>10} {'step s':>9} "
    f"{'gen s':>8} {'train s':>8} {'idle':>6} {'waits s':>8} {'cost/M':>9}"
)


def lines(demand: Demand, choices: Sequence[Choice]) -> Iterator[str]:
    """The lines for the terminal."""
    yield from _sites(demand)
    yield HEAD
    for choice in choices:
        yield _row(choice)
    yield from _advice(demand, best_of(choices))


def _sites(demand: Demand) -> Iterator[str]:
    generation, training = demand.generation, demand.training
    device = generation.profile.device if generation.profile else "as configured"
    yield f"{generation.devices} devices ({device})" + (" that generate" if training else "")
    if training is not None:
        device = training.profile.device if training.profile else "as configured"
        link = f", {demand.link_gbps:g} Gbit/s between them" if demand.link_gbps else ""
        yield f"{training.devices} devices ({device}) that train{link}"


def _row(choice: Choice) -> str:
    predicted, split = choice.prediction, choice.split
    ratio = f"{split.workers} : {split.trainers}"
    return (
        f"{choice.mode:17} {ratio:>11} {choice.max_num_seqs:6d} {choice.max_staleness:6d} "
        f"{predicted.trajectories_per_s:9.2f} {predicted.tokens_per_s:10.0f} {predicted.step_s:9.2f} "
        f"{split.generate_s:8.2f} {split.train_s:8.2f} {predicted.workers_idle:6.0%} "
        f"{predicted.wait_for_batch_s:8.2f} {choice.cost:9.2f}"
    )


def _advice(demand: Demand, choice: Choice) -> Iterator[str]:
    yield ""
    yield f"# the choice with the least staleness within {2 * WORTH:.0%} of the highest throughput"
    yield "# (cost/M: cost of a million trajectories, in the currency of --price)"
    yield f"[run]\nworkers = {choice.split.workers}"
    yield f'[loop]\nmode = "{choice.mode}"'
    if choice.mode == "trajectory_async":
        yield f"max_staleness = {choice.max_staleness}"
    yield f"[generation]\nmax_num_seqs = {choice.max_num_seqs}"
    if choice.split.trainers > 1:
        yield f"[training]\nranks = {choice.split.trainers}"
    yield f"[batching]\ntoken_budget = {choice.token_budget}"
    spare = demand.generation.devices - choice.split.workers
    spare += demand.training.devices if demand.training else 0
    if spare > choice.split.trainers:
        limited = (
            f" (a trainer may use {demand.most_trainers})" if choice.split.trainers == demand.most_trainers else ""
        )
        yield f"# {spare - choice.split.trainers} devices are not needed{limited}"
    if choice.simulated_share < 1:
        yield f"# simulated with {choice.simulated_share:.0%} of the workers and of the groups, and extrapolated"
