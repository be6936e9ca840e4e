"""Makes a broker's topics match the catalogue. The differences are a plan of changes, and applying carries it out.

Invariants: applying twice changes nothing the second time; applying deletes nothing, shrinks nothing and removes no
replicas.
"""

import asyncio
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from typing import Literal

from aiokafka import TopicPartition as KafkaPartition
from aiokafka.admin import AIOKafkaAdminClient, NewPartitions, NewTopic
from aiokafka.admin.config_resource import ConfigResource, ConfigResourceType
from aiokafka.errors import KafkaTimeoutError, for_code

from streamrl.bus.kafka.aiokafka_internals import client_of, expecting_new_topics
from streamrl.bus.kafka.connection import (
    client_options,
    converting_errors,
    discard,
    partition_counts,
    started,
    topics_named,
)
from streamrl.bus.kafka.settings import KafkaSettings
from streamrl.bus.kafka.subscription import ConsumerFactory
from streamrl.bus.port import TopicPartition
from streamrl.schemas.errors import BrokerError, BusUnavailable
from streamrl.schemas.identifiers import parse_scope, policy_in
from streamrl.schemas.topics import CATALOGUE, INSTANCE_TOPICS, Topic

READY_TIMEOUT_S = 60.0
"""Seconds to wait for the leaders of new partitions.

A cluster that just started takes seconds; on a busy machine this is longer than a request's time-out.
"""
GONE_POLL_S = 0.2
ATTEMPTS = 3
"""Attempts at changing topics when connections break. Repeats are safe: applying again changes nothing."""
_CLIENT_ID = "streamrl-topics"
_TOPIC_EXISTS = 36
_SET_ON_TOPIC = 1
"""``config_source`` of a value that was set on the topic itself."""


@dataclass(frozen=True)
class TopicChange:
    """One difference between the broker and the catalogue. A conflict is a difference that applying leaves alone."""

    kind: Literal["create", "add partitions", "set", "conflict"]
    topic: str
    detail: str

    def __str__(self) -> str:
        return f"{self.kind}: {self.topic}: {self.detail}"


@dataclass(frozen=True)
class _Wanted:
    name: str
    topic: Topic
    partitions: int
    replicas: int


@dataclass(frozen=True)
class _Found:
    partitions: int
    replicas: int
    configs: dict[str, str | None]
    own: dict[str, str | None]
    """The part of ``configs`` that was set on the topic itself."""


@dataclass
class _Plan:
    changes: list[TopicChange] = field(default_factory=list)
    create: list[NewTopic] = field(default_factory=list)
    grow: dict[str, NewPartitions] = field(default_factory=dict)
    alter: list[ConfigResource] = field(default_factory=list)


async def diff_topics(
    bootstrap_servers: str,
    run: str,
    trajectory_partitions: int,
    replication_factor: int | None = None,
    settings: KafkaSettings | None = None,
) -> list[TopicChange]:
    """The changes that ``apply_topics`` would make. ``settings`` gives the security of the connection.

    Raises:
        BrokerError: no broker answers.
        BusError: the broker refuses.
    """
    named = (settings or KafkaSettings()).model_copy(update={"bootstrap_servers": bootstrap_servers})
    admin = await _admin(named)
    try:
        return (await _plan(admin, run, trajectory_partitions, replication_factor)).changes
    finally:
        await discard(admin)


async def apply_topics(
    bootstrap_servers: str,
    run: str,
    trajectory_partitions: int,
    replication_factor: int | None = None,
    settings: KafkaSettings | None = None,
) -> list[TopicChange]:
    """Create missing topics, add partitions, correct settings, and wait until every partition has a leader.

    Args:
        bootstrap_servers: any broker of the cluster.
        run: prefix of the topics' names.
        trajectory_partitions: buckets × shards.
        replication_factor: replicas of new topics; None: one per broker, at most three.
        settings: security of the connection.

    Returns:
        The changes made, and the conflicts that were left alone.

    Raises:
        BrokerError: no broker answers, or it has too few nodes.
        BusUnavailable: the connection broke in every attempt.
        BusError: the broker refuses.
    """
    named = (settings or KafkaSettings()).model_copy(update={"bootstrap_servers": bootstrap_servers})
    changes: list[TopicChange] = []
    for attempts_left in reversed(range(ATTEMPTS)):
        admin = await _admin(named)
        try:
            plan = await _plan(admin, run, trajectory_partitions, replication_factor)
            # The first attempt's plan counts, because a failed attempt may have carried out a part of it.
            changes = changes or plan.changes
            with converting_errors(f"changing the topics of run {run}"):
                async with asyncio.timeout(READY_TIMEOUT_S):
                    await _carry_out(admin, plan)
            break
        except BusUnavailable:
            # The admin client fails with its connection, which a broker may close at any moment, for example in a
            # restart.
            if not attempts_left:
                raise
            await asyncio.sleep(GONE_POLL_S)
        finally:
            await discard(admin)
    # The 1 is arbitrary: waiting for leaders uses only names and numbers of partitions, not replicas.
    await _wait_for_leaders(named, _wanted(run, trajectory_partitions, 1))
    return changes


async def topics_of(settings: KafkaSettings, run: str) -> list[str]:
    """Full names of the topics that a run has on the broker, including those of its attached instances.

    Raises:
        BrokerError: no broker answers.
    """
    held = await partition_counts(settings, _CLIENT_ID)
    own = [name for topic in topics_of_scope(run) if (name := topic.full_name(run)) in held]
    scopes = sorted({name.rpartition(".")[0] for name in held} - {run})
    instances = [scope for scope in scopes if parse_scope(scope)[0] == run]
    return own + [name for scope in instances for topic in INSTANCE_TOPICS if (name := topic.full_name(scope)) in held]


def topics_of_scope(scope: str) -> tuple[Topic, ...]:
    """The topics whose names start with a scope: all topics for a run, only its own for an instance."""
    return CATALOGUE if policy_in(scope) is None else INSTANCE_TOPICS


async def delete_topics(settings: KafkaSettings, run: str) -> list[str]:
    """Delete a run's topics with all their records, wait until they are gone, and return their names.

    Raises:
        BrokerError: no broker answers.
        BusError: the broker refuses, or the topics still exist after ``READY_TIMEOUT_S``.
    """
    names = await topics_of(settings, run)
    if not names:
        return []
    admin = await _admin(settings)
    try:
        with converting_errors(f"deleting the topics of run {run}"):
            async with asyncio.timeout(READY_TIMEOUT_S):
                response = await admin.delete_topics(names)
                for name, code, *_ in response.topic_error_codes:
                    _refuse_error(code, f"deleting {name}")
                # The answer comes before every broker has deleted the topics. Until then, new topics of these names
                # would be refused.
                while True:
                    if not await topics_of(settings, run):
                        return names
                    await asyncio.sleep(GONE_POLL_S)
    finally:
        await discard(admin)


async def _admin(settings: KafkaSettings) -> AIOKafkaAdminClient:
    return await started(AIOKafkaAdminClient(**client_options(settings, _CLIENT_ID)), settings)


def _wanted(run: str, trajectory_partitions: int, replicas: int) -> list[_Wanted]:
    return [
        _Wanted(topic.full_name(run), topic, topic.partition_count(trajectory_partitions), replicas)
        for topic in topics_of_scope(run)
    ]


async def _plan(
    admin: AIOKafkaAdminClient, run: str, trajectory_partitions: int, replication_factor: int | None
) -> _Plan:
    with converting_errors(f"reading the topics of run {run}"):
        async with asyncio.timeout(READY_TIMEOUT_S):
            brokers = len(client_of(admin).cluster.brokers())
            if replication_factor is not None and replication_factor > brokers:
                raise BrokerError(
                    f"expected kafka.replication_factor of at most {brokers}, the number of brokers, "
                    f"got {replication_factor}; lower it or add brokers"
                )
            # Three: two replicas can acknowledge while one is down. More replicas than brokers would be refused.
            wanted = _wanted(run, trajectory_partitions, replication_factor or min(3, brokers))
            found = await _describe(admin, [each.name for each in wanted])
    plan = _Plan()
    for each in wanted:
        if each.name in found:
            _compare(plan, each, found[each.name], exact_replicas=replication_factor is not None)
        else:
            configs = each.topic.configs(replication_factor=each.replicas)
            plan.create.append(NewTopic(each.name, each.partitions, each.replicas, topic_configs=configs))
            detail = f"{each.partitions} partitions, {each.replicas} replicas, {each.topic.cleanup_policy}"
            plan.changes.append(TopicChange("create", each.name, detail))
    return plan


def _compare(plan: _Plan, wanted: _Wanted, found: _Found, *, exact_replicas: bool) -> None:
    name = wanted.name
    if found.partitions < wanted.partitions:
        plan.grow[name] = NewPartitions(wanted.partitions)  # Kafka wants the new total, not the difference
        plan.changes.append(TopicChange("add partitions", name, f"{found.partitions} → {wanted.partitions}"))
    elif found.partitions > wanted.partitions:
        detail = f"has {found.partitions} partitions, wanted {wanted.partitions}; Kafka cannot remove partitions"
        plan.changes.append(TopicChange("conflict", name, detail))
    # Only if the user named a number: the default follows the number of brokers, which may have changed since.
    if exact_replicas and found.replicas != wanted.replicas:
        detail = f"has {found.replicas} replicas, wanted {wanted.replicas}; reassign them with Kafka's own tools"
        plan.changes.append(TopicChange("conflict", name, detail))
    # By the existing replicas: if more replicas had to be in sync than exist, no record could be written.
    configs = wanted.topic.configs(replication_factor=found.replicas)
    differing = {key: value for key, value in configs.items() if found.configs.get(key) != value}
    if differing:
        # This request sets a topic's whole configuration: a setting that it leaves out returns to the broker's default.
        merged = {**found.own, **configs}
        plan.alter.append(ConfigResource(ConfigResourceType.TOPIC, name, configs=merged))
        for key, value in differing.items():
            plan.changes.append(TopicChange("set", name, f"{key}: {found.configs.get(key)} → {value}"))


async def _describe(admin: AIOKafkaAdminClient, names: Sequence[str]) -> dict[str, _Found]:
    topics = await topics_named(client_of(admin), names)
    if not topics:
        return {}
    resources = [ConfigResource(ConfigResourceType.TOPIC, name) for name in topics]
    entries = [entry for response in await admin.describe_configs(resources) for entry in response.resources]
    found = {}
    for code, message, _kind, name, configs, *_ in entries:
        _refuse_error(code, f"reading the settings of {name}: {message}")
        partitions = topics[name]
        found[name] = _Found(
            partitions=len(partitions),
            # The fewest of any partition, since every partition must be able to reach min.insync.replicas.
            replicas=min(len(each["replicas"]) for each in partitions),
            configs={key: value for key, value, *_ in configs},
            own={key: value for key, value, _, source, *_ in configs if source == _SET_ON_TOPIC},
        )
    return found


async def _carry_out(admin: AIOKafkaAdminClient, plan: _Plan) -> None:
    if plan.create:
        response = await admin.create_topics(plan.create)
        for name, code, *message in response.topic_errors:
            if code != _TOPIC_EXISTS:  # another process was faster
                _refuse_error(code, f"creating {name}: {message}")
    if plan.grow:
        await admin.create_partitions(plan.grow)
    if plan.alter:
        for response in await admin.alter_configs(plan.alter):
            for code, message, _kind, name in response.resources:
                _refuse_error(code, f"setting {name}: {message}")


def _refuse_error(code: int, doing: str) -> None:
    if code:  # 0: no error
        raise for_code(code)(doing)


async def _wait_for_leaders(settings: KafkaSettings, wanted: Sequence[_Wanted]) -> None:
    """Wait until every leader answers with an offset. Metadata names a leader slightly before it has the partition."""
    partitions = [TopicPartition(each.name, number) for each in wanted for number in range(each.partitions)]
    with expecting_new_topics({each.name for each in wanted}):
        consumer = await ConsumerFactory(settings, _CLIENT_ID, None).open_consumer(partitions)
        try:
            with converting_errors(f"waiting for the leaders of {len(partitions)} partitions"):
                async with asyncio.timeout(READY_TIMEOUT_S):
                    while True:
                        # The client fails after one request's time-out, when a broker may still be making partitions.
                        with suppress(KafkaTimeoutError):
                            await consumer.end_offsets([KafkaPartition(*each) for each in partitions])
                            return
        finally:
            await discard(consumer)
