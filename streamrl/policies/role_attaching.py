"""`streamrl attach`, the later commands for attached instances, and their status.

An instance is a named trainer next to the run's own one. Its settings are the run's, with another algorithm and other
changes from the command line. They are stored in the instance's directory, so that a later `attach` need not repeat
them.
"""

import asyncio
import time
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any

from streamrl.bus.history import BusHistory
from streamrl.bus.kafka.bus import KafkaBus
from streamrl.bus.kafka.cluster import offsets_since
from streamrl.bus.kafka.topic_admin import apply_topics
from streamrl.bus.port import TopicPartition, message_of
from streamrl.bus.waiting import in_thread
from streamrl.deploy.wiring.broker import send_command
from streamrl.deploy.wiring.process import configure_logging
from streamrl.inspection.dead_letters import moment
from streamrl.inspection.diagnostics.connect import RunConnection, connect
from streamrl.inspection.source import RUNS, directory_of
from streamrl.observability.run_state.feed import ends_by_bucket
from streamrl.observability.run_state.trajectory_summary import summary_of
from streamrl.policies.role_instance_trainer import RECENT, SILENT_AFTER_S, NameHolder, keep_trainer_alive
from streamrl.policies.role_run_part import standing
from streamrl.policies.splitting import ArmRewards
from streamrl.schemas.control import InstanceState, OperatorAction, PolicySplit, Served, WeightsReady
from streamrl.schemas.errors import UserError
from streamrl.schemas.identifiers import INSTANCES, SERVED_POLICY, scope_of
from streamrl.schemas.reports import StepReport, TrainerBeat
from streamrl.schemas.settings import LoopSettings
from streamrl.schemas.topics import CONTROL, HEARTBEATS, STEPS, TRAJECTORIES
from streamrl.settings.layers import Tree, from_toml, merged
from streamrl.settings.loading import as_toml, load_settings
from streamrl.settings.run_directory import RunDirectory, instance_location
from streamrl.settings.tree import Settings

SERVED_ALONE = frozenset({"sampling", "staleness_cap", "passed_over"})
"""Settings of ``[ingest]`` that an instance does not take over from the run."""


@dataclass(frozen=True)
class AttachRequest:
    """The instance to attach.

    ``algorithm`` and ``begin``: None for the values of the last time, or the run's. ``begin``: see
    ``place_in_the_stream``. ``changes``: settings as ``section.key=value``.
    """

    name: str
    algorithm: str | None = None
    begin: str | None = None
    changes: tuple[str, ...] = ()


def attach(run: Path, servers: str | None, request: AttachRequest, *, adopt: bool = False) -> int:
    """Attach an instance to a running run, and keep its trainer alive until it ends; returns the exit code.

    Raises:
        UserError: the run does not exist or is not running, a setting is wrong, or another command keeps a trainer with
            that name alive.
        StreamRLError: the trainer could not be kept alive.
    """
    configure_logging()
    connection = asyncio.run(connect(run, servers).with_run())
    if request.begin is not None:
        request = replace(request, begin=asyncio.run(place_in_the_stream(request.begin, connection, run)))
    settings = instance_settings(connection, run, request)
    return asyncio.run(_keep_attached(connection, settings, adopt=adopt))


async def _keep_attached(connection: RunConnection, settings: Settings, *, adopt: bool) -> int:
    run, copies = settings.run, settings.kafka.replication_factor
    await apply_topics(connection.address, scope_of(run.name, run.instance), 1, copies, connection.kafka)
    # The name comes before any write: the settings in the directory may be those of a running trainer.
    async with NameHolder(KafkaBus(connection.kafka), run.name, run.instance).holding():
        keep_settings(settings)
        fields = {"policy": run.instance, "algorithm": settings.algorithm.name}
        attached_at = await in_thread(
            partial(send_command, connection.kafka, connection.run, "attach", "operator", **fields)
        )
        connected = settings.model_copy(update={"kafka": connection.kafka})
        return await keep_trainer_alive(connected, attached_at, adopt=adopt)


async def place_in_the_stream(text: str, connection: RunConnection, run: Path) -> str:
    """The value of ``ingest.attach_from`` for ``now``, ``beginning``, offsets or a time.

    Offsets are one number for every partition, or one each. For a time, the broker gives the offsets.

    Raises:
        UserError: ``text`` is none of these.
    """
    if text in ("now", "beginning") or "=" in text:
        return text
    tree = from_toml(_directory(run).config)
    partitions = range(load_settings(None, [], tree, to_look=True).loop.trajectory_partitions)
    if text.isascii() and text.isdigit():
        offsets = dict.fromkeys(partitions, int(text))
    else:
        topic = TRAJECTORIES.full_name(connection.run)
        since = moment(text, time.time())
        found = await offsets_since(connection.kafka, (TopicPartition(topic, number) for number in partitions), since)
        offsets = {tp.partition: offset for tp, offset in found.items()}
    return ",".join(f"{partition}={offset}" for partition, offset in sorted(offsets.items()))


def _directory(run: Path) -> RunDirectory:
    directory = directory_of(run)
    if directory is None:
        raise UserError(
            f"expected a run's directory, or its name under {RUNS}/, got {run}; attach on the machine of the run"
        )
    return directory


def instance_settings(connection: RunConnection, run: Path, request: AttachRequest) -> Settings:
    """The settings of an instance's trainer, as its directory stores them.

    Raises:
        UserError: the run's directory is not here, or a setting is wrong.
    """
    directory = _directory(run)
    tree = from_toml(directory.config)
    own = RunDirectory(directory.path / INSTANCES / request.name)
    if request.name in (SERVED_POLICY, tree.get("algorithm", {}).get("name")):
        raise UserError(
            f"expected an instance name that differs from the run's own trainer, got {request.name!r}; use for example "
            f"{request.name}-2"
        )
    if own.config.is_file():
        tree = from_toml(own.config)
    elif location := tree.get("training", {}).get("checkpoint_location"):
        tree = merged(tree, {"training": {"checkpoint_location": instance_location(location, request.name)}})
    settings = load_settings(None, _arguments(request), _based_on(tree, directory, request), to_look=True)
    # The address found now may be different the next time, so it is not stored.
    address = {"bootstrap_servers": settings.kafka.bootstrap_servers}
    return settings.model_copy(update={"kafka": connection.kafka.model_copy(update=address)})


def keep_settings(settings: Settings) -> None:
    """Write an instance's settings into its directory, from which its trainer reads them."""
    own = RunDirectory(settings.run.path)
    own.path.mkdir(parents=True, exist_ok=True)
    own.write_config(as_toml(settings))


def _based_on(tree: Tree, directory: RunDirectory, request: AttachRequest) -> Tree:
    if request.algorithm is not None and tree.get("algorithm", {}).get("name") != request.algorithm:
        # The file has every value of the former algorithm. Without them, the new algorithm's preset applies.
        tree = {name: section for name, section in tree.items() if name != "algorithm"}
    # The order in which the served trainer takes groups is not the instance's.
    ingest = {key: value for key, value in tree.get("ingest", {}).items() if key not in SERVED_ALONE}
    tree = {**tree, "ingest": ingest} if ingest else {name: part for name, part in tree.items() if name != "ingest"}
    # The directory may have moved, or the path may be relative to another folder than when the run started.
    place = {"name": directory.path.name, "directory": str(directory.path.parent), "instance": request.name}
    return merged(tree, {"run": place})


def _arguments(request: AttachRequest) -> list[str]:
    arguments = []
    for change in request.changes:
        key, equals, value = change.partition("=")
        if not equals or "." not in key:
            raise UserError(f"expected section.key=value, got {change!r}")
        arguments.append(f"--{key.strip().lstrip('-')}={value}")
    given = {"algorithm.name": request.algorithm, "ingest.attach_from": request.begin}
    return arguments + [f"--{key}={value}" for key, value in given.items() if value is not None]


def tell(run: Path | None, servers: str | None, action: OperatorAction, name: str, reason: str) -> str:
    """Ask an attached instance to pause, resume, leave or be served; returns one line that confirms it.

    Raises:
        UserError: the run does not exist, has no such instance, or the action is impossible.
    """
    connection = asyncio.run(connect(run, servers).with_run())
    known = {one.name: one for one in asyncio.run(read_instances(connection)) if one.mode != "detached"}
    if name not in known:
        others = ", ".join(sorted(set(known) - {SERVED_POLICY})) or "none"
        raise UserError(f"expected an instance attached to run {connection.run}, got {name!r}; attached are: {others}")
    if action == "promote":
        _check_promotion(known[name], connection.run)
    elif name == SERVED_POLICY:
        raise UserError("expected an attached instance, got the run's own trainer; `streamrl pause` pauses the run")
    elif known[name].served and action in ("detach", "pause_instance"):
        raise UserError(
            f"expected an instance that is not served, got {name!r}, whose weights the workers follow; promote another "
            f"policy first: `streamrl promote {SERVED_POLICY} --run {connection.run}` promotes the run's own"
        )
    send_command(connection.kafka, connection.run, action, reason, policy=name)
    return f"asked instance {name} of run {connection.run} at {connection.address}: {action.partition('_')[0]}"


def _check_promotion(instance: "InstanceStatus", run: str) -> None:
    if instance.served:
        raise UserError(f"expected an instance that is not served, got {instance.name!r}, which is served already")
    if instance.mode != "run" or not instance.alive:
        got = "a paused one" if instance.mode == "pause" else "no heartbeat"
        raise UserError(
            f"expected {instance.name!r} to be running before workers follow it, got {got}; "
            f"start it with `streamrl algorithms resume {instance.name} --run {run}` or "
            f"`streamrl attach {instance.name} --run {run}`"
        )


@dataclass(frozen=True)
class InstanceStatus:
    """The status of one instance.

    ``mode``: the mode that an operator set last. ``alive``: whether its last heartbeat is recent. ``version`` and
    ``step`` are of its newest weights; ``reward`` and ``age`` (in served versions) of its last step. They are None
    before its first step. ``lag``: trajectories that it has not finished by now. ``share``: its share of the groups;
    ``workers``: number of its workers, while the served policy has all others. ``sampled`` and ``sampled_reward``: how
    many of the newest trajectories its weights sampled, and their mean reward. These four are None without a split.
    """

    name: str
    algorithm: str
    mode: str
    served: bool
    alive: bool
    version: str | None = None
    step: int | None = None
    reward: float | None = None
    age: float | None = None
    lag: int | None = None
    share: float | None = None
    workers: int | None = None
    sampled: int | None = None
    sampled_reward: float | None = None

    def to_json(self) -> dict[str, Any]:
        """A dictionary for JSON."""
        return dict(self.__dict__)


async def read_instances(connection: RunConnection) -> list[InstanceStatus]:
    """The status of the run's own trainer, and of all instances that were ever attached to the run.

    Raises:
        BusUnavailable: no broker answers.
    """
    return await instances_on(
        BusHistory(connection.bus, client_id="streamrl-instances"), connection.run, connection.reward_weights
    )


async def instances_on(history: BusHistory, run: str, reward_weights: Mapping[str, float]) -> list[InstanceStatus]:
    """The same as ``read_instances``, from a run's topics."""
    attached: dict[str, InstanceState] = {}
    weights: WeightsReady | None = None
    split: PolicySplit | None = None
    served = SERVED_POLICY
    async for record in history.records(CONTROL.full_name(run)):
        match message_of(record):
            case InstanceState() as state:
                attached[state.policy] = state
            case WeightsReady() as weights:
                pass
            case Served(policy=served):
                pass
            case PolicySplit() as split:
                pass
    extents = await history.extents(TRAJECTORIES.full_name(run))
    ends = ends_by_bucket({tp: held.end for tp, held in extents.items()}, LoopSettings.shards)
    own = await _status(history, run, SERVED_POLICY, None, served, ends)
    if weights is not None and own.version is None and served == SERVED_POLICY:
        own = InstanceStatus(SERVED_POLICY, "", "run", True, False, str(weights.version), weights.step)
    found = [own] + [await _status(history, run, name, attached[name], served, ends) for name in sorted(attached)]
    if split is None or not split.arms:
        return found
    return await _with_arms(history, run, found, split, reward_weights)


async def _with_arms(
    history: BusHistory,
    run: str,
    found: Sequence["InstanceStatus"],
    split: PolicySplit,
    reward_weights: Mapping[str, float],
) -> list["InstanceStatus"]:
    """``found``, with the recent samples of each arm of the split."""
    from streamrl.inspection.diagnostics.tail import newest_records

    topic, rewards = TRAJECTORIES.full_name(run), ArmRewards()
    for record in await newest_records(history, topic, await history.extents(topic), RECENT):
        if (summary := summary_of(record, reward_weights)) is not None:
            rewards.add(summary.policy, summary.reward)
    shares, workers = split.shares, Counter(split.workers.values())
    extended = []
    for one in found:
        arm = "" if one.served else one.name
        if arm and arm not in shares:
            extended.append(one)
            continue
        share = shares[arm] if arm else max(0.0, 1.0 - sum(shares.values()))
        count, mean = rewards.of(arm)
        own = replace(one, share=share, workers=workers[arm] if arm else None)
        extended.append(replace(own, sampled=count, sampled_reward=mean))
    return extended


async def _status(
    history: BusHistory, run: str, name: str, state: InstanceState | None, served: str, ends: Mapping[int, int]
) -> InstanceStatus:
    from streamrl.inspection.diagnostics.tail import newest_records

    # Before the reads, which may take longer than a heartbeat is recent on a busy machine.
    asked_at, scope = time.time(), scope_of(run, name)
    report: StepReport | None = None
    beat: TrainerBeat | None = None
    for topic in (STEPS, HEARTBEATS):
        extents = await history.extents(topic.full_name(scope))
        if not extents:
            continue
        for record in await newest_records(history, topic.full_name(scope), extents, RECENT):
            match message_of(record):
                case StepReport() as report:
                    pass
                case TrainerBeat() as beat:
                    pass
    return InstanceStatus(
        name=name,
        algorithm=report.algorithm if report is not None else state.algorithm if state is not None else "",
        mode="run" if state is None else state.mode,
        served=name == served,
        alive=beat is not None and asked_at - beat.sent_at < SILENT_AFTER_S,
        **standing(report, ends),
    )


def status_lines(instances: Sequence[InstanceStatus]) -> list[str]:
    """A table of the instances, one line each."""
    head = ["instance", "algorithm", "mode", "alive", "version", "reward", "age", "lag"]
    has_arms = any(one.share is not None for one in instances)
    head += ["share", "workers", "sampled", "mean reward"] if has_arms else []
    rows = [head] + [
        [
            f"{one.name}{' (served)' if one.served else ''}",
            one.algorithm or "-",
            one.mode,
            "yes" if one.alive else "no",
            one.version or "-",
            *("-" if value is None else f"{value:.3g}" for value in (one.reward, one.age, one.lag)),
            *(_arm_cells(one) if has_arms else ()),
        ]
        for one in instances
    ]
    widths = [max(len(row[column]) for row in rows) for column in range(len(head))]
    return ["  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)).rstrip() for row in rows]


def _arm_cells(one: InstanceStatus) -> list[str]:
    workers = "others" if one.served else one.workers
    share = None if one.share is None else f"{one.share:.3g}"
    mean = None if one.sampled_reward is None else f"{one.sampled_reward:.3g}"
    is_arm = one.share is not None
    return ["-" if value is None or not is_arm else str(value) for value in (share, workers, one.sampled, mean)]
