"""Finds the broker and the run for a command: the named ones, or the only ones. Starts nothing, writes nothing.

Invariant observers_do_not_affect_a_run: no group is joined and no offset committed, so that any number of commands can
look at once.
"""

import shlex
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, replace
from functools import cached_property
from pathlib import Path

from pydantic import ValidationError

from streamrl.bus.embedded.detached import running_bootstrap_servers
from streamrl.bus.kafka.bus import KafkaBus
from streamrl.bus.kafka.settings import KafkaSettings
from streamrl.inspection.source import RUNS, PastRun, directory_of, nodes_of, open_run, own_broker
from streamrl.observability.run_state.state import RunProgress, RunState
from streamrl.schemas.errors import SettingsError, UserError
from streamrl.schemas.identifiers import is_plain_name, policy_in, scope_of
from streamrl.schemas.topics import STEPS, TRAJECTORIES, Topic
from streamrl.settings.features import run_parts
from streamrl.settings.layers import from_environment
from streamrl.settings.run_directory import RunDirectory
from streamrl.settings.tree import Settings

CLIENT_ID = "streamrl-look"


class TopicsMissing(UserError):
    """The broker that answers does not have the run's topics."""


class BrokerStopped(UserError):
    """The run's own broker is stopped. ``past``: the run's directory and settings."""

    def __init__(self, message: str, past: PastRun) -> None:
        super().__init__(message)
        self.past = past


@dataclass(frozen=True)
class RunConnection:
    """A broker and a run. ``run`` empty: not known yet. ``settings`` None: only the broker was named.

    ``kafka``: settings with the broker's address; ``data``: folder of the run's own broker, if that is the broker.
    """

    kafka: KafkaSettings
    run: str
    settings: Settings | None = None
    data: Path | None = None

    @cached_property
    def bus(self) -> KafkaBus:
        """The bus of the broker. It is shared, so that an unreachable broker is reported once."""
        return KafkaBus(self.kafka, self.advice)

    @property
    def advice(self) -> str:
        """What a user can do when the broker does not answer; empty if it is not known to be a run's own broker."""
        if self.data is None:
            return ""
        # A single node is restarted on its old port, so that this address reaches it again.
        _, *others = addresses = self.address.split(",")
        nodes = f" --nodes {len(addresses)}" if others else f" --port {self.address.rpartition(':')[2]}"
        command = f"streamrl kafka up --data-dir {shlex.quote(str(self.data))}{nodes}"
        return f"if run {self.run} has ended, its broker has stopped too: `{command}` starts it again"

    @property
    def directory(self) -> Path | None:
        """The run's directory, if it is on this machine."""
        own = None if self.settings is None else self.settings.run
        scope = "" if own is None else scope_of(own.name, own.instance)
        if self.data is not None and policy_in(scope) is None:
            return self.data.parent
        named = None if own is None else own.path
        # Settings name a directory even if the run is on another machine, and another run may have its name.
        is_here = named is not None and self.run == scope
        return named if is_here and named is not None and RunDirectory(named).config.is_file() else None

    @property
    def address(self) -> str:
        """The broker's address."""
        return self.kafka.bootstrap_servers or ""

    @property
    def reward_weights(self) -> Mapping[str, float]:
        """Weights of the run's reward functions by name; empty if its settings are unknown, then each has weight 1."""
        return {} if self.settings is None else self.settings.rewards.weight_by_name

    def new_state(self) -> RunState:
        """The state of the run before any record is read."""
        if (settings := self.settings) is None:
            return RunState(self.run, parts=run_parts(self.run))
        progress = RunProgress(planned_steps=settings.training.max_steps, step_trajectories=settings.loop.step_samples)
        return RunState(self.run, self.reward_weights, run_parts(self.run), settings.run.stall_s, progress=progress)

    def name_of(self, topic: Topic) -> str:
        """Full name of one of the run's topics."""
        return topic.full_name(self.run)

    async def with_run(self) -> "RunConnection":
        """The connection with a run that is on the broker.

        Raises:
            TopicsMissing: the named run is not on the broker.
            UserError: no run was named, and there is not exactly one.
            BrokerError: no broker answers.
        """
        from streamrl.bus.kafka.connection import partition_counts

        found = runs_of(await partition_counts(self.kafka, CLIENT_ID))
        if self.run in found:
            return self
        there = ", ".join(found) or "none"
        if self.run:
            raise TopicsMissing(f"expected the topics of run {self.run} at {self.address}, found those of: {there}")
        # Attached instances belong to a run: without a name, the run is meant.
        found = [name for name in found if policy_in(name) is None]
        if len(found) != 1:
            raise UserError(f"expected one run at {self.address}, found: {there}; name one with --run")
        return replace(self, run=found[0])


def runs_of(topics: Iterable[str]) -> list[str]:
    """Names of the runs that have topics on a broker."""
    names = set(topics)
    ends = f".{STEPS.name}"
    # A stranger's topic may have this ending too, but a run also has a topic of trajectories.
    candidates = sorted(name.removesuffix(ends) for name in names if name.endswith(ends))
    return [run for run in candidates if TRAJECTORIES.full_name(run) in names]


def connect(run: Path | None, servers: str | None) -> RunConnection:
    """The broker and run that the command line names: by a run's directory, configuration or name, or just a broker.

    With no run named, it is the newest run under ``runs/`` with a running broker, or `streamrl kafka up`'s broker. A
    run whose directory is not on this machine is looked for by its name, on the named broker or on one of those.

    Raises:
        UserError: there is no such run, or no broker.
        BrokerStopped: the run is here, and its own broker is stopped.
    """
    if run is None:
        return _connect_to_broker(servers, "")
    if not run.exists() and directory_of(run) is None and is_plain_name(str(run)):
        return _connect_to_broker(servers, str(run))
    past = open_run(run)
    # The command line has priority over the settings, and the run's own broker over one that many runs may share.
    named, own = servers or past.settings.kafka.bootstrap_servers, own_broker(past.directory)
    address = named or own or running_bootstrap_servers()
    if address is None:
        raise BrokerStopped(_without_broker(run, past), past)
    # The data folder, and so the command to start it again, is known only for the run's own broker.
    data = past.directory.kafka if address == own else None
    return RunConnection(_at(past.settings.kafka, address), past.name, past.settings, data)


def _without_broker(run: Path, past: PastRun) -> str:
    problem = f"expected a running broker of run {past.name}, got none: "
    if past.is_finished:
        problem = f"run {past.name} has finished, and no running broker has its topics: "
    if not nodes_of(past.directory):
        return problem + "name one with --bootstrap-servers"
    return (
        f"{problem}a run's own broker stops with the run; start it again with "
        f"`{past.directory.broker_command}`, or read the run's files with `streamrl report --run {run}`, "
        f"`streamrl show ID --run {run}` or `streamrl audit --run {run}`"
    )


def _connect_to_broker(servers: str | None, run: str) -> RunConnection:
    kafka = kafka_from_environment()
    if address := servers or kafka.bootstrap_servers:
        return RunConnection(_at(kafka, address), run)
    for directory in _newest_first(RUNS):
        if directory.config.is_file() and (address := own_broker(directory)):
            past = open_run(directory.path)
            return RunConnection(_at(past.settings.kafka, address), run or past.name, past.settings, directory.kafka)
    if address := running_bootstrap_servers():
        return RunConnection(_at(kafka, address), run)
    wanted = f"run {run} under {RUNS}/, or a running broker with its topics" if run else "a running broker"
    raise UserError(
        f"expected {wanted}, got none under {RUNS}/ and none of `streamrl kafka up`: name a broker with "
        "--bootstrap-servers HOST:PORT, or a run's directory or configuration with --run"
    )


def kafka_from_environment() -> KafkaSettings:
    """Settings to reach a broker without a configuration file: a password, for example, is read from the environment.

    Raises:
        SettingsError: a variable has a wrong value.
    """
    try:
        return KafkaSettings.model_validate(from_environment().get("kafka", {}))
    except ValidationError as error:
        first = error.errors(include_url=False)[0]
        key = ".".join(("kafka", *map(str, first["loc"])))
        raise SettingsError(f"setting {key}: {first['msg'].removeprefix('Value error, ')}") from error


def _at(kafka: KafkaSettings, address: str) -> KafkaSettings:
    return kafka.model_copy(update={"bootstrap_servers": address})


def _newest_first(runs: Path) -> list[RunDirectory]:
    folders = [path for path in runs.glob("*") if path.is_dir()]
    return [RunDirectory(path) for path in sorted(folders, key=lambda path: path.stat().st_mtime, reverse=True)]
