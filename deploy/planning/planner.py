"""`streamrl plan`: which devices generate, which train, with which settings, and what that delivers. Runs nothing.

Splits are ranked by their stage times, which come from simulations with the other stage taking no time; the best are
simulated whole, and their settings varied.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from functools import cache

from deploy.planning.allocation import Split, one_site, two_sites
from deploy.planning.derived import MODES, Mode, composed, token_budget
from deploy.planning.prediction import Prediction, plant_of, simulate
from deploy.planning.simulation.work import Plant
from deploy.planning.supply import RunSupply
from deploy.settings.tree import Settings
from schemas.profiles.profile import DeviceProfile
from schemas.profiles.training import TrainingCosts

STEPS = 6
CANDIDATES = 3
WORTH = 0.02
"""A gain in throughput below this share is not worth more staleness or fewer slots."""
SECONDS_AN_HOUR = 3600.0
BITS = 8e9
NO_COSTS = TrainingCosts(forward_backward_s_per_token=0.0)


@dataclass(frozen=True)
class Site:
    """Devices of one type at one place: how many, what was measured of one, what one costs an hour."""

    devices: int
    profile: DeviceProfile | None = None
    price: float = 0.0


@dataclass(frozen=True)
class Demand:
    """``training``: None where trainers are of the same devices. ``weights_gb`` cross the link at each step."""

    settings: Settings
    generation: Site
    training: Site | None = None
    link_gbps: float | None = None
    weights_gb: float = 0.0
    recorded: Sequence[int] = ()


@dataclass(frozen=True)
class Choice:
    """A mode with its best split and settings; ``cost``: of a million trajectories, in the unit of the prices."""

    mode: Mode
    split: Split
    max_staleness: int
    max_num_seqs: int
    token_budget: int
    prediction: Prediction
    cost: float


@dataclass
class Planner:
    """One demand, worked through mode by mode."""

    demand: Demand
    supply: RunSupply = field(init=False)

    def __post_init__(self) -> None:
        self.supply = RunSupply(self._settings("trajectory_async"), self.demand.recorded)

    def choices(
        self, modes: Sequence[Mode] = MODES, progress: Callable[[str], None] = lambda line: None
    ) -> list[Choice]:
        """The best of each mode."""
        found = []
        for mode in modes:
            progress(f"looking for the best split in mode {mode}")
            found.append(self._choice(mode))
        return found

    def _choice(self, mode: Mode) -> Choice:
        settings = self._settings(mode)
        best = max(
            ((split, self._simulated(settings, split)) for split in self._splits(settings)),
            key=lambda pair: pair[1].trajectories_per_s,
        )
        split, prediction = best
        settings, prediction = self._fewer_slots(settings, split, prediction)
        settings, prediction = self._fresher(settings, split, prediction)
        return Choice(
            mode=mode,
            split=split,
            max_staleness=settings.loop.staleness_bound,
            max_num_seqs=settings.generation.max_num_seqs,
            token_budget=settings.batching.token_budget,
            prediction=prediction,
            cost=self._cost(split, prediction),
        )

    def _splits(self, settings: Settings) -> list[Split]:
        plant = self._plant(settings)
        at_site = composed(settings.loop.mode, plant.latencies.announce_s + plant.curve.settings.adopt_s)

        @cache
        def generate_s(workers: int) -> float:
            idle = replace(plant, workers=workers, costs=NO_COSTS, latencies=replace(plant.latencies, trajectory_s=0.0))
            return simulate(idle, self.supply.afresh(settings)).step_s

        @cache
        def train_s(trainers: int) -> float:
            return training_s(replace(plant, trainers=trainers), self.supply)

        demand = self.demand
        if demand.training is not None:
            return [two_sites(demand.generation.devices, demand.training.devices, generate_s, train_s, at_site)]
        return one_site(demand.generation.devices, generate_s, train_s, at_site, CANDIDATES)

    def _fewer_slots(self, settings: Settings, split: Split, best: Prediction) -> tuple[Settings, Prediction]:
        """Fewer completions at once, if that is faster: it may be where a step waits for its longest one."""
        slots = settings.generation.max_num_seqs
        while slots > 1:
            slots //= 2
            fewer = _with(settings, "generation", max_num_seqs=slots)
            prediction = self._simulated(fewer, split)
            if prediction.trajectories_per_s < best.trajectories_per_s * (1 + WORTH):
                break
            settings, best = fewer, prediction
        return settings, best

    def _fresher(self, settings: Settings, split: Split, best: Prediction) -> tuple[Settings, Prediction]:
        """The smallest staleness bound that costs next to no throughput."""
        if settings.loop.mode != "trajectory_async":
            return settings, best
        for bound in range(1, settings.loop.max_staleness):
            fresher = _with(settings, "loop", max_staleness=bound)
            prediction = self._simulated(fresher, split)
            if prediction.trajectories_per_s >= best.trajectories_per_s * (1 - WORTH):
                return fresher, prediction
        return settings, best

    def _simulated(self, settings: Settings, split: Split) -> Prediction:
        plant = replace(self._plant(settings), workers=split.workers, trainers=split.trainers)
        return simulate(plant, self.supply.afresh(settings))

    def _plant(self, settings: Settings) -> Plant:
        """With weights on their way for as long as was measured, or as the link between the sites takes."""
        plant, demand = plant_of(settings, STEPS + settings.loop.staleness_bound), self.demand
        seconds = demand.generation.profile.weight_transfer_s if demand.generation.profile else 0.0
        if demand.link_gbps:
            seconds += demand.weights_gb * BITS / (demand.link_gbps * 1e9)
        latencies = replace(plant.latencies, announce_s=plant.latencies.announce_s + seconds)
        return replace(plant, latencies=latencies)

    def _settings(self, mode: Mode) -> Settings:
        """The demand's, in this mode, with what was measured, and micro-batches of the size that pays."""
        demand = self.demand
        settings = _with(demand.settings, "loop", mode=mode)
        trainer = demand.training or demand.generation
        emulation: dict[str, object] = {}
        if demand.generation.profile is not None:
            emulation["decode"] = demand.generation.profile.decode
        if trainer.profile is not None:
            emulation["training"] = trainer.profile.training
        settings = _with(settings, "emulation", **emulation)
        longest = settings.loop.max_prompt_length + settings.loop.max_completion_length
        budget = token_budget(settings.emulation.training, longest, settings.batching.token_budget)
        return _with(settings, "batching", token_budget=budget)

    def _cost(self, split: Split, prediction: Prediction) -> float:
        generation, training = self.demand.generation, self.demand.training or self.demand.generation
        hourly = split.workers * generation.price + split.trainers * training.price
        return 1e6 / prediction.trajectories_per_s * hourly / SECONDS_AN_HOUR


def training_s(plant: Plant, supply: RunSupply) -> float:
    """Seconds of a step's training alone: the mean over some steps' groups, without waiting."""
    groups, costs = plant.loop.groups_per_step * STEPS, plant.costs
    works = [supply.work(supply.draft(position)) for position in range(groups)]
    lengths = [work.prompt_tokens + length for work in works for length in work.lengths]
    tokens, squares = sum(lengths), sum(length * length for length in lengths)
    shared = (
        costs.forward_backward_s_per_token * tokens
        + costs.forward_backward_s_per_squared_token * squares
        + costs.forward_backward_s_per_micro_batch * tokens / plant.batching.token_budget
    )
    return shared / plant.trainers / STEPS + costs.optimizer_step_s + costs.export_s


def best_of(choices: Sequence[Choice]) -> Choice:
    """The one with the least staleness among those that deliver next to the most."""
    most = max(choice.prediction.trajectories_per_s for choice in choices)
    return min(
        (choice for choice in choices if choice.prediction.trajectories_per_s >= most * (1 - 2 * WORTH)),
        key=lambda choice: choice.max_staleness,
    )


def _with(settings: Settings, section: str, **values: object) -> Settings:
    return settings.model_copy(update={section: getattr(settings, section).model_copy(update=values)})
