"""What a seed means: the shape of a run, its rates of faults, and who does what harm. Pure."""

from dataclasses import dataclass, field, replace
from random import Random

from tests.simulation.bus.faults import FaultRates
from tests.simulation.parts.sampling import SamplingFaults

TAKES = ("oldest", "freshest", "capped", "absolute_advantage")
NO_FAULTS = SamplingFaults()
CALM = FaultRates(latency_s=0.004)
LOSSY = replace(
    CALM, request_lost=0.05, ack_lost=0.08, refused=0.02, late=0.7, slow_poll=0.1, empty_poll=0.05, latency_s=0.01
)
TORN = replace(LOSSY, txn_unanswered=0.3, txn_refused=0.15)


@dataclass(frozen=True)
class Harm:
    """How often, by name of the act; acts are drawn in proportion to these weights."""

    kill_trainer: float = 0.0
    kill_in_write: float = 0.0
    fail_write: float = 0.0
    stop_trainer: float = 0.0
    zombie_trainer: float = 0.0
    second_trainer: float = 0.0
    damage_checkpoint: float = 0.0
    kill_worker: float = 0.0
    pause_worker: float = 0.0
    zombie_worker: float = 0.0
    second_worker: float = 0.0
    stop_worker: float = 0.0
    kill_dispatcher: float = 0.0
    pause_dispatcher: float = 0.0
    zombie_dispatcher: float = 0.0
    second_dispatcher: float = 0.0
    kill_coordinator: float = 0.0
    zombie_coordinator: float = 0.0
    second_coordinator: float = 0.0
    broker_outage: float = 0.0
    poison: float = 0.0
    repeat_record: float = 0.0
    pause_flow: float = 0.0
    retention: float = 0.0
    zombie_in_write: float = 0.0
    step_clock: float = 0.0
    cut_network: float = 0.0
    slow_disk: float = 0.0
    repeat_trained: float = 0.0
    kill_everybody: float = 0.0
    restore_checkpoint: float = 0.0
    lose_directory: float = 0.0
    second_holder: float = 0.0
    kill_grader: float = 0.0
    pause_grader: float = 0.0
    zombie_grader: float = 0.0
    second_grader: float = 0.0
    stop_grader: float = 0.0
    poison_ungraded: float = 0.0
    kill_instance: float = 0.0
    kill_instance_in_write: float = 0.0
    stop_instance: float = 0.0
    zombie_instance: float = 0.0
    second_instance: float = 0.0
    pause_instance: float = 0.0
    promote: float = 0.0
    split: float = 0.0
    detach_instance: float = 0.0


@dataclass(frozen=True)
class Setup:
    """One simulated run. ``slow_reward``: share of the rewards that take a minute or so; ``once``: no harm is done for
    which a token may be sampled twice, or a trajectory delivered twice.
    """

    seed: int
    scenario: str
    rates: FaultRates
    harm: Harm
    sampling: SamplingFaults = NO_FAULTS
    bad_gradient: float = 0.0
    out_of_memory: float = 0.0
    failing_fetch: float = 0.0
    workers: int = 2
    slots: int = 4
    groups_per_step: int = 2
    num_generations: int = 2
    max_staleness: int = 1
    max_steps: int = 6
    checkpoint_every: int = 2
    keep_checkpoints: int = 2
    weight_sync_steps: int = 1
    shards: int = 1
    prompts: int = 1000
    token_s: float = 0.05
    compute_s: float = 0.05
    by_lineage: bool = False
    dynamic_sampling: bool = False
    fixed_batches: bool = False
    accept_loss: bool = False
    durable: bool = False
    graders: int = 0
    repack: bool = False
    idle: bool = False
    slow_reward: float = 0.0
    once: bool = False
    attached_from: str = ""
    takes: str = "oldest"
    passed_over: str = "train"
    staleness_cap: int | None = None
    harm_every_s: float = 1.5
    harm_for_s: float = 15.0
    patience_s: float = 240.0
    must_finish: bool = True


@dataclass(frozen=True)
class Scenario:
    """A kind of harm; ``vary`` changes what was drawn for the run's shape. One that takes no turns is run by name.

    ``durable``: the share of its runs in which partial trajectories are on record; ``repack``: of these, the share in
    which the dispatcher moves them; ``idle``: of the rest, the share in which workers too take weights only when they
    run nothing. ``takes``: the orders in which groups are taken, of which each run has one.
    """

    rates: FaultRates
    harm: Harm
    sampling: SamplingFaults = NO_FAULTS
    vary: dict[str, object] = field(default_factory=dict)
    takes_turns: bool = True
    durable: float = 0.0
    repack: float = 0.0
    idle: float = 0.0
    takes: tuple[str, ...] = ("oldest",)


_TRAINER = Harm(kill_trainer=2, kill_in_write=3, stop_trainer=1, fail_write=1, damage_checkpoint=0.7)
_TAILS: dict[str, object] = {  # more may begin than there are slots, or nobody would be released for it
    "workers": 4,
    "slots": 4,
    "groups_per_step": 3,
    "num_generations": 3,
    "max_staleness": 4,
    "fixed_batches": False,
    "weight_sync_steps": 1,
}
_TWO_POLICIES: dict[str, object] = {"attached_from": "beginning", "by_lineage": False, "harm_for_s": 25.0}
SCENARIOS: dict[str, Scenario] = {
    "calm": Scenario(CALM, Harm()),
    "lossy": Scenario(LOSSY, Harm(repeat_record=1)),
    "outages": Scenario(CALM, Harm(broker_outage=1)),
    "trainer-crashes": Scenario(CALM, _TRAINER, vary={"harm_every_s": 1.0}),
    "trainer-crashes-lossy": Scenario(TORN, replace(_TRAINER, broker_outage=0.5)),
    "torn-transactions": Scenario(TORN, Harm(kill_trainer=1, kill_coordinator=1, zombie_coordinator=1)),
    "zombie-trainers": Scenario(
        TORN, Harm(zombie_trainer=2, second_trainer=1, kill_trainer=1, kill_in_write=1, zombie_in_write=2)
    ),
    "workers": Scenario(LOSSY, Harm(kill_worker=2, pause_worker=1, stop_worker=1), vary={"workers": 3}),
    "zombie-workers": Scenario(LOSSY, Harm(zombie_worker=2, second_worker=1, kill_worker=1, repeat_record=1)),
    "partial-trajectories": Scenario(
        LOSSY,
        Harm(
            kill_worker=3,
            stop_worker=1,
            pause_worker=1,
            zombie_worker=1,
            second_worker=0.3,
            kill_dispatcher=1,
            kill_everybody=1,
            broker_outage=0.5,
        ),
        SamplingFaults(engine=0.05),
        {"workers": 3, "token_s": 0.2},
        durable=1.0,
    ),
    "graders": Scenario(
        LOSSY,
        Harm(
            kill_grader=3,
            pause_grader=1,
            zombie_grader=1.5,
            second_grader=0.5,
            stop_grader=1,
            poison_ungraded=0.5,
            kill_worker=1,
            kill_dispatcher=1,
            kill_trainer=0.5,
            kill_everybody=0.5,
            broker_outage=0.5,
            repeat_record=0.3,
        ),
        SamplingFaults(reward_error=0.05, no_reward=0.03),
        {"graders": 2, "workers": 2},
    ),
    "instances": Scenario(  # a second algorithm on the stream; its harm is to be nobody else's
        TORN,
        Harm(
            kill_instance=3,
            kill_instance_in_write=2,
            stop_instance=0.5,
            zombie_instance=1,
            second_instance=0.5,
            pause_instance=1,
            kill_trainer=1,
            kill_coordinator=0.5,
            kill_worker=0.5,
            broker_outage=0.5,
            poison=0.5,
            repeat_record=0.5,
        ),
        SamplingFaults(abort=0.02, reward_error=0.03),
        {"attached_from": "beginning"},
    ),
    "instances-from-now": Scenario(
        LOSSY,
        Harm(kill_instance=2, kill_instance_in_write=1, zombie_instance=1, kill_trainer=1, kill_worker=0.5),
        vary={"attached_from": "now"},
        takes_turns=False,
    ),
    "promotions": Scenario(  # workers follow now the one, now the other, and both keep their books
        TORN,
        Harm(
            promote=3,
            kill_instance=1,
            kill_instance_in_write=0.5,
            zombie_instance=0.5,
            kill_trainer=1,
            zombie_trainer=0.5,
            kill_coordinator=1,
            zombie_coordinator=0.3,
            kill_dispatcher=1,
            kill_worker=0.5,
            broker_outage=0.3,
        ),
        SamplingFaults(abort=0.02),
        {"attached_from": "beginning", "by_lineage": False, "max_steps": 10, "harm_for_s": 25.0},
    ),
    "promotions-from-now": Scenario(
        LOSSY,
        Harm(promote=2, kill_instance=1, kill_dispatcher=1),
        vary={"attached_from": "now", "by_lineage": False, "max_steps": 10, "harm_for_s": 25.0},
        takes_turns=False,
    ),
    "splits": Scenario(  # some groups are sampled with the weights of one trainer, some with the other's
        TORN,
        Harm(
            split=4,
            detach_instance=0.4,
            kill_instance=1,
            kill_instance_in_write=0.3,
            zombie_instance=0.3,
            pause_instance=0.3,
            kill_trainer=0.7,
            zombie_trainer=0.3,
            kill_coordinator=1,
            zombie_coordinator=0.5,
            kill_dispatcher=1,
            zombie_dispatcher=0.3,
            kill_worker=2,
            stop_worker=0.3,
            pause_worker=0.5,
            zombie_worker=0.5,
            broker_outage=0.3,
        ),
        SamplingFaults(engine=0.03, abort=0.02),
        {**_TWO_POLICIES, "workers": 3, "max_steps": 16, "failing_fetch": 0.1},
        durable=0.5,
        repack=0.5,
        idle=0.2,
    ),
    "splits-and-promotions": Scenario(
        LOSSY,
        Harm(
            split=3,
            promote=1.5,
            kill_instance=1,
            kill_trainer=0.7,
            kill_coordinator=1,
            kill_dispatcher=1,
            kill_worker=1,
        ),
        vary={**_TWO_POLICIES, "workers": 3, "max_steps": 16},
        takes_turns=False,
        durable=0.3,
    ),
    "repack": Scenario(
        LOSSY,
        Harm(
            kill_worker=3,
            stop_worker=0.5,
            pause_worker=1,
            zombie_worker=1,
            second_worker=0.3,
            kill_dispatcher=1,
            zombie_dispatcher=0.3,
            kill_everybody=0.3,
            broker_outage=0.5,
        ),
        SamplingFaults(engine=0.05, refused=0.05),
        {**_TAILS, "token_s": 0.5},
        durable=1.0,
        repack=1.0,
    ),
    "repack-slow-rewards": Scenario(  # all workers live, so whatever dispatchers do, nothing is sampled again
        CALM,
        Harm(kill_dispatcher=2, pause_dispatcher=1, zombie_dispatcher=1, second_dispatcher=0.5, kill_coordinator=0.3),
        vary={
            **_TAILS,
            "token_s": 1.0,
            "max_steps": 8,
            "slow_reward": 0.1,
            "once": True,
            "harm_every_s": 4.0,
            "harm_for_s": 80.0,
        },
        durable=1.0,
        repack=1.0,
    ),
    "control-plane": Scenario(
        TORN,
        Harm(
            kill_dispatcher=2,
            pause_dispatcher=1,
            zombie_dispatcher=1,
            second_dispatcher=0.5,
            kill_coordinator=2,
            zombie_coordinator=1,
            second_coordinator=0.5,
            pause_flow=1,
        ),
    ),
    "poison": Scenario(
        LOSSY,
        Harm(poison=3, repeat_record=2, kill_trainer=1),
        SamplingFaults(engine=0.02, abort=0.05, reward_error=0.08, no_reward=0.05, refused=0.05),
        {"bad_gradient": 0.15, "failing_fetch": 0.2, "out_of_memory": 0.1},
    ),
    "retention": Scenario(  # the dispatcher is not told of groups that were deleted, and may wait for them for ever
        CALM,
        Harm(retention=2, kill_trainer=1, pause_worker=0.5),
        vary={"accept_loss": True, "must_finish": False, "patience_s": 30.0},
    ),
    "clocks": Scenario(
        CALM,
        Harm(
            step_clock=4,
            kill_dispatcher=1.5,
            kill_coordinator=0.5,
            kill_trainer=0.5,
            kill_worker=0.5,
            zombie_dispatcher=0.3,
            repeat_record=0.3,
        ),
    ),
    "sampling": Scenario(  # many whole groups at once, of several versions, so that there is a choice
        TORN,
        Harm(
            kill_trainer=2,
            kill_in_write=2,
            stop_trainer=0.5,
            zombie_trainer=1,
            restore_checkpoint=0.5,
            kill_worker=1,
            pause_worker=1,
            zombie_worker=0.5,
            kill_dispatcher=1,
            broker_outage=0.5,
            poison=0.5,
            repeat_record=0.5,
        ),
        SamplingFaults(abort=0.02, reward_error=0.03),
        {
            "workers": 3,
            "slots": 8,
            "max_staleness": 3,
            "token_s": 0.02,
            "compute_s": 0.6,
            "max_steps": 8,
            "bad_gradient": 0.05,
            "out_of_memory": 0.03,
            "harm_every_s": 2.5,
            "harm_for_s": 40.0,
        },
        takes=("freshest", "capped", "absolute_advantage"),
    ),
    "three-brokers": Scenario(
        LOSSY,
        Harm(cut_network=4, slow_disk=2, kill_trainer=0.5, kill_worker=0.5, kill_dispatcher=0.5, step_clock=0.3),
    ),
    "restores": Scenario(
        LOSSY,
        Harm(restore_checkpoint=3, kill_trainer=1, kill_in_write=1, zombie_trainer=0.5, damage_checkpoint=0.3),
        vary={"checkpoint_every": 1, "max_steps": 12, "keep_checkpoints": 3, "harm_for_s": 20.0},
    ),
    "directories": Scenario(
        LOSSY,
        Harm(
            lose_directory=1,
            second_holder=2,
            kill_trainer=1,
            kill_in_write=1,
            zombie_trainer=0.5,
            zombie_in_write=0.5,
            kill_dispatcher=0.5,
            restore_checkpoint=0.4,
        ),
    ),
    "thousands": Scenario(
        CALM,
        Harm(repeat_trained=3, kill_trainer=0.5, repeat_record=1),
        SamplingFaults(abort=0.99),
        {
            "groups_per_step": 4,
            "num_generations": 1,
            "max_staleness": 4,
            "max_steps": 4,
            "checkpoint_every": 1,
            "token_s": 0.001,
            "compute_s": 0.02,
            "slots": 16,
            "workers": 2,
            "prompts": 10_000,
            "shards": 1,
            "dynamic_sampling": False,
            "fixed_batches": False,
            "weight_sync_steps": 1,
            "harm_for_s": 60.0,
            "harm_every_s": 1.5,
        },
        takes_turns=False,
    ),
    "everything": Scenario(
        TORN,
        Harm(
            kill_trainer=2,
            kill_in_write=2,
            fail_write=0.5,
            stop_trainer=0.5,
            zombie_trainer=1,
            damage_checkpoint=0.3,
            kill_worker=1.5,
            pause_worker=0.5,
            zombie_worker=1,
            second_worker=0.3,
            stop_worker=0.5,
            kill_dispatcher=1,
            pause_dispatcher=0.5,
            zombie_dispatcher=0.5,
            kill_coordinator=1,
            zombie_coordinator=0.5,
            broker_outage=1,
            poison=1,
            repeat_record=1,
            zombie_in_write=0.5,
            step_clock=1,
            cut_network=0.5,
            slow_disk=0.3,
            repeat_trained=0.3,
            restore_checkpoint=0.4,
        ),
        SamplingFaults(engine=0.01, abort=0.02, reward_error=0.03, no_reward=0.02),
        {"bad_gradient": 0.05, "failing_fetch": 0.1},
        durable=0.5,
        repack=0.5,
        idle=0.3,
    ),
    "idle": Scenario(  # under all bounds of staleness, 0 too; whoever waits for weights must not be waited for
        LOSSY,
        Harm(
            kill_worker=2,
            stop_worker=0.5,
            pause_worker=1,
            zombie_worker=1,
            kill_trainer=1,
            kill_dispatcher=1,
            kill_coordinator=0.5,
            broker_outage=0.5,
            pause_flow=0.5,
        ),
        SamplingFaults(engine=0.05),
        {"workers": 3, "failing_fetch": 0.2},
        durable=0.3,
        idle=1.0,
    ),
}


def draw_setup(seed: int, scenario: str | None = None) -> Setup:
    """The run that a seed stands for; without a name, the scenarios take turns."""
    names = [each for each, kind in SCENARIOS.items() if kind.takes_turns]
    name = scenario or names[seed % len(names)]
    kind = SCENARIOS[name]
    chance = Random(f"{name}/{seed}")
    groups, samples = chance.choice([1, 2, 2, 3]), chance.choice([1, 2, 2, 3])
    drawn = Setup(
        seed=seed,
        scenario=name,
        rates=kind.rates,
        harm=kind.harm,
        sampling=kind.sampling,
        workers=chance.choice([1, 2, 2, 3]),
        slots=chance.choice([2, 4, 8]),
        groups_per_step=groups,
        num_generations=samples,
        max_staleness=chance.choice([0, 1, 1, 2, 4]),
        max_steps=chance.choice([4, 6, 8]),
        checkpoint_every=chance.choice([1, 2, 3]),
        keep_checkpoints=chance.choice([2, 3]),
        shards=chance.choice([1, 2]),
        prompts=chance.choice([7, 1000]),
        token_s=chance.choice([0.02, 0.05, 0.15]),
        compute_s=chance.choice([0.02, 0.1]),
        by_lineage=chance.random() < 0.5,
    )
    chance.choice(range(3))  # a spare draw that decides nothing: seeds go on meaning what they meant
    drawn = replace(drawn, dynamic_sampling=samples > 1 and chance.random() < 0.2)
    drawn = replace(drawn, weight_sync_steps=chance.randint(1, min(2, drawn.max_staleness + 1)))
    drawn = replace(drawn, fixed_batches=drawn.max_staleness == 1 and chance.random() < 0.5)
    drawn = replace(drawn, durable=chance.random() < kind.durable)
    drawn = replace(drawn, repack=drawn.durable and chance.random() < kind.repack)
    # Drawn only where it decides anything: seeds of other scenarios go on meaning what they meant.
    drawn = replace(drawn, idle=drawn.repack or (kind.idle > 0 and chance.random() < kind.idle))
    drawn = replace(drawn, **kind.vary)  # type: ignore[arg-type]
    return drawn if kind.takes == ("oldest",) else taking(drawn, chance.choice(kind.takes), chance)


def taking(setup: Setup, takes: str, chance: Random) -> Setup:
    """The same run, whose trainer takes groups in such an order; batches that were fixed leave none to be chosen."""
    bound = max(1, setup.max_staleness) if takes == "capped" else setup.max_staleness
    cap = chance.randrange(bound) if takes == "capped" else None
    return replace(
        setup,
        takes=takes,
        passed_over=chance.choice(["train", "skip"]),
        max_staleness=bound,
        staleness_cap=cap,
        weight_sync_steps=setup.weight_sync_steps if cap is None else min(setup.weight_sync_steps, cap + 1),
        fixed_batches=False,
    )
