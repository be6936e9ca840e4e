"""What a finished world left behind, put before the judges: bus history, ledger, audit."""

from collections import Counter
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, replace
from typing import Any

from streamrl.bus.port import Record
from streamrl.consumers.training.checkpoints.catalogue import read_rollback
from streamrl.schemas.errors import CheckpointError, WireError
from streamrl.schemas.identifiers import graders_group
from streamrl.schemas.messages import Message
from streamrl.schemas.reports import RefusedStep, SkipRecord, StepReport
from streamrl.schemas.topics import SKIPS, STEPS, TRAJECTORIES, UNGRADED
from streamrl.schemas.trajectories import Trajectory, UngradedTrajectory
from tests.simulation.bus.broker import Broker, committed
from tests.simulation.bus.events import digest_of
from tests.simulation.history import Acknowledged, BusHistory, Delivered, Problem, judge_bus
from tests.simulation.judges.audit import audit
from tests.simulation.judges.ledger import Checkpoint, Evidence, Spot, judge_training
from tests.simulation.parts.checkpoints import SimCheckpoints, SimDirectory, at_once
from tests.simulation.parts.sampling import MARKS_OF_A_POLICY, mark_of_policy, sampled_at, simulated_token
from tests.simulation.worlds.crew import RUN, SCOPE
from tests.simulation.worlds.world import World


def judge(world: World) -> list[Problem]:
    """Everything that is wrong, the processes' own complaints first."""
    return [
        *world.problems,
        *judge_bus(bus_history(world)),
        *_judged(world),
        *judge_parts(trajectories_of(world).values()),
        *(judge_idle(trajectories_of(world).values()) if world.setup.idle else ()),
        *judge_policies(trajectories_of(world).values()),
        *(judge_once(world.crew.sampled, trajectories_of(world).values()) if world.setup.once else ()),
        *judge_grading(world),
        *audit(world),
        *_refused(world),
    ]


def judge_parts(trajectories: Iterable[Trajectory | None]) -> list[Problem]:
    """Every token stands where it was sampled, and changes its engine only where the trajectory says so."""
    found = []
    for one in trajectories:
        if one is None or not len(one.token_ids):
            continue
        marks, positions = zip(*(sampled_at(float(logprob)) for logprob in one.logprobs), strict=True)
        tokens = [simulated_token(one.trajectory_id, n) for n in range(len(positions))]
        changes = {n for n in range(1, len(marks)) if marks[n] != marks[n - 1]}
        if list(positions) != list(range(len(positions))) or one.token_ids.tolist() != tokens:
            found.append(
                Problem("parts", f"tokens of {one.trajectory_id} are not where they were sampled: {positions}")
            )
        if not changes <= {part.start for part in one.parts}:
            found.append(Problem("parts", f"{one.trajectory_id} changes its engine at {changes}, it says {one.parts}"))
    return found


def judge_once(sampled: Mapping[tuple[str, int], int], trajectories: Iterable[Trajectory | None]) -> Iterator[Problem]:
    """Nothing was done twice."""
    again = Counter(name for (name, _), times in sampled.items() if times > 1)
    for name, tokens in again.items():
        yield Problem("sampled twice", f"{tokens} tokens of {name}")
    delivered = Counter(one.trajectory_id for one in trajectories if one is not None)
    for name, times in delivered.items():
        if times > 1:
            yield Problem("delivered twice", f"{name}, {times} times")


def judge_idle(trajectories: Iterable[Trajectory | None]) -> list[Problem]:
    """Where weights are taken when nothing runs, what one process sampled of a completion is of one version."""
    found = []
    for one in trajectories:
        begun = {part.start for part in one.parts} if one is not None else set()
        changes = {span.start for span in one.version_spans if span.start} if one is not None else set()
        if one is not None and not changes <= begun:
            found.append(Problem("adoption", f"{one.trajectory_id} changes its weights at {changes}, not at {begun}"))
    return found


def judge_policies(trajectories: Iterable[Trajectory | None]) -> list[Problem]:
    """All tokens of a completion were sampled with weights of the policy that it names."""
    found = []
    for one in trajectories:
        if one is None:
            continue
        marks = {sampled_at(float(logprob))[0] // MARKS_OF_A_POLICY for logprob in one.logprobs}
        if not marks <= {mark_of_policy(one.policy) // MARKS_OF_A_POLICY}:
            found.append(Problem("policy", f"{one.trajectory_id}, of policy {one.policy!r}, has tokens of {marks}"))
    return found


def judge_grading(world: World) -> list[Problem]:
    """Whatever the graders' group has committed is a trajectory, with their reward or the reason for none."""
    broker, group = world.bus.broker, graders_group(RUN)
    graded = {found.trajectory_id: found for found in trajectories_of(world).values() if found is not None}
    problems = []
    for log in broker.logs(UNGRADED.full_name(RUN)):
        low = broker.committed.get((group, log.tp), 0)
        for record in committed(log):
            message = _decoded(record)
            if record.offset >= low or not isinstance(message, UngradedTrajectory):
                continue
            found = graded.get(message.trajectory_id)
            if found is None:
                problems.append(Problem("lost", f"{message.trajectory_id} is committed by the graders and not graded"))
            elif "judge" not in found.rewards and not found.reward_errors:
                problems.append(Problem("ledger", f"{message.trajectory_id} has no reward of the graders'"))
    return problems


def _judged(world: World) -> list[Problem]:
    try:
        books = [evidence(world), *([instance_evidence(world)] if world.setup.attached_from else [])]
        return [problem for each in books for problem in judge_training(each)]
    except CheckpointError as error:
        return [Problem("contents", str(error))]


def _refused(world: World) -> list[Problem]:
    """Nothing was written into a directory that never held the run."""
    strangers = [each for each in world.crew.directories if each.identity.load() is None]
    return [
        Problem("refusal", f"a directory that never held the run has lineages {sorted(each.place.numbers)}")
        for each in strangers
        if each.place.numbers or each.place.pieces
    ]


def bus_history(world: World) -> BusHistory:
    """Of the whole bus."""
    broker, events = world.bus.broker, world.bus.events
    logs = [log for partitions in broker.topics.values() for log in partitions]
    return BusHistory(
        logs={(log.tp.topic, log.tp.partition): {r.offset: digest_of(r.value) for r in committed(log)} for log in logs},
        acknowledged=[Acknowledged(*ack) for ack in events.acknowledged],
        delivered=[Delivered(*who, offsets) for who, offsets in events.delivered.items()],
        first={(log.tp.topic, log.tp.partition): log.first for log in logs},
    )


def evidence(world: World) -> Evidence:
    """Of the run's own trainer."""
    return _evidence(world, RUN, world.crew.directory)


def instance_evidence(world: World) -> Evidence:
    """Of the attached instance, whose versions say nothing of the age of what it trains unless it is served."""
    found = _evidence(world, SCOPE, world.crew.instance)
    return found if found.has_promotions else replace(found, max_staleness=1 << 30)


def rows_of(world: World, scope: str = RUN) -> list[SkipRecord]:
    """Everything on a skips topic."""
    return [m for m in _messages(world.bus.broker, SKIPS.full_name(scope)) if isinstance(m, SkipRecord)]


def _evidence(world: World, scope: str, directory: SimDirectory) -> Evidence:
    broker, setup = world.bus.broker, world.setup
    newest = SimCheckpoints(directory.place, setup.keep_checkpoints, lambda name: None, at_once).newest()
    checkpoint, rollback = None, read_rollback(directory.place)
    if newest is not None:
        manifest = newest.state.manifest
        frontier: Any = manifest.frontier
        checkpoint = Checkpoint(manifest.policy_version, frontier, newest.state.saved.contents, manifest.skips.count)
    return Evidence(
        records=trajectories_of(world),
        reports=[m for m in _messages(broker, STEPS.full_name(scope)) if isinstance(m, StepReport | RefusedStep)],
        rows=rows_of(world, scope),
        groups_per_step=setup.groups_per_step,
        max_staleness=setup.max_staleness if setup.staleness_cap is None else setup.staleness_cap,
        checkpoint=checkpoint,
        gone=world.bus.broker.gone,
        began=_beginnings(broker, scope),
        orphans_through=directory.orphans_through,
        has_promotions=bool(setup.harm.promote),
        rolled_back=None if rollback is None else (rollback.version, rollback.lineage),
    )


def trajectories_of(world: World) -> dict[Spot, Trajectory | None]:
    """Everything on the trajectories topic; none: bytes that do not decode."""
    found: dict[Spot, Trajectory | None] = {}
    for log in world.bus.broker.logs(TRAJECTORIES.full_name(RUN)):
        for record in committed(log):
            message = _decoded(record)
            found[record.partition, record.offset] = message if isinstance(message, Trajectory) else None
    return found


def _beginnings(broker: Broker, scope: str) -> dict[int, float]:
    found: dict[int, float] = {}
    for log in broker.logs(STEPS.full_name(scope)):
        for slot in log.slots:
            report = None if slot.record is None else _decoded(slot.record)
            if isinstance(report, StepReport) and not report.group_ids:
                found.setdefault(report.version.lineage, slot.at)
    return found


def _messages(broker: Broker, topic: str) -> list[Message]:
    decoded = (_decoded(record) for log in broker.logs(topic) for record in committed(log))
    return [message for message in decoded if message is not None]


def _decoded(record: Record) -> Message | None:
    try:
        return record.message()
    except WireError:
        return None


@dataclass(frozen=True)
class Counts:
    """Problems by what they mean for the promises."""

    lost: int
    trained_twice: int
    audit_failures: int

    @classmethod
    def of(cls, problems: list[Problem]) -> "Counts":
        """Sort problems."""
        rules = [problem.rule for problem in problems]
        return cls(
            sum(rule in ("lost", "lost write") for rule in rules),
            sum(rule == "duplicate effect" for rule in rules),
            sum(rule in ("ledger", "phantom", "contents", "frontier", "parts", "audit") for rule in rules),
        )
