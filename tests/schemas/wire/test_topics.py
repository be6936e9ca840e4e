import ast
from functools import cache
from pathlib import Path

import pytest

from streamrl.deploy.wiring.build import role_names
from streamrl.schemas.codec import MESSAGES
from streamrl.schemas.control import Control
from streamrl.schemas.topics import (
    CATALOGUE,
    CONTROL,
    DEAD_LETTERS,
    EVALUATIONS,
    HEARTBEATS,
    PARTIAL_TRAJECTORIES,
    TRAJECTORIES,
    Topic,
)
from tests.architecture.sources import parsed

ROOT = Path(__file__).parents[3]
COMMANDS = {"operator", "attach", "audit", "dlq", "export", "report", "top"}
"""Writers and readers that are commands of a user, not roles."""
by_name = pytest.mark.parametrize("topic", CATALOGUE, ids=lambda topic: topic.name)


def test_names_are_unique_and_full_names_carry_the_run() -> None:
    names = [topic.name for topic in CATALOGUE]
    assert len(set(names)) == len(names)
    assert TRAJECTORIES.full_name("run-1") == "run-1.trajectories"


@by_name
def test_every_topic_has_one_role_that_writes_and_at_least_one_that_reads(topic: Topic) -> None:
    # What no worker delivers the dispatcher completes, and reads back as it reads everything there; the trainer says on
    # control whose run it is, under a key of its own, and among heartbeats that it is alive, to one that stands by;
    # there relays say so too, to each other, and who keeps an instance's trainer alive, to others that would.
    # Where graders judge, they make trajectories of what workers gave them; what they cannot read is a dead letter too.
    others = {
        TRAJECTORIES: {"dispatcher", "grader"},
        CONTROL: {"trainer"},
        HEARTBEATS: {"trainer", "attach", "relay"},
        DEAD_LETTERS: {"grader"},
    }.get(topic, set())
    assert len(set(topic.writers) - others) == 1
    assert topic.readers
    # One worker goes on with what another one wrote, and a restarted evaluator with what it has reported.
    assert topic in (PARTIAL_TRAJECTORIES, EVALUATIONS) or not (set(topic.writers) - others) & set(topic.readers)


@by_name
def test_every_topic_takes_the_largest_message_of_its_kind(topic: Topic) -> None:
    largest = (
        max(message.MAX_BYTES for message in MESSAGES.values()) if topic.message is None else topic.message.MAX_BYTES
    )
    assert topic.max_message_bytes > largest
    assert topic.configs(replication_factor=1)["max.message.bytes"] == str(topic.max_message_bytes)


def test_every_kind_of_message_has_a_topic() -> None:
    carried = {kind for topic in CATALOGUE for kind in (topic.message, *topic.also) if kind is not None}
    kinds = set(MESSAGES.values()) | {CONTROL.message}
    assert carried == kinds
    assert CONTROL.message is not None
    assert issubclass(CONTROL.message, Control)


def test_dead_letters_take_whatever_any_topic_refused() -> None:
    assert DEAD_LETTERS.message is None
    assert DEAD_LETTERS.max_message_bytes >= TRAJECTORIES.max_message_bytes


@pytest.mark.parametrize(("copies", "in_sync"), [(1, "1"), (2, "1"), (3, "2"), (5, "4")])
@by_name
def test_one_copy_may_be_missing_and_writing_goes_on(topic: Topic, copies: int, in_sync: str) -> None:
    assert topic.configs(replication_factor=copies)["min.insync.replicas"] == in_sync


@by_name
def test_how_long_a_record_is_kept_rests_on_no_writer_s_clock(topic: Topic) -> None:
    # Compacted ones too: their segments are closed, hence cleaned, by the stamps of their records.
    assert topic.configs(replication_factor=1)["message.timestamp.type"] == "LogAppendTime"


@by_name
def test_kept_for_ever_means_compacted_and_else_a_time_is_set(topic: Topic) -> None:
    configs = topic.configs(replication_factor=1)
    if topic.cleanup_policy == "compact":
        assert "retention.ms" not in configs
    else:
        assert int(configs["retention.ms"]) > 0


def test_partitions_of_trajectories_come_from_the_settings_and_others_are_fixed() -> None:
    assert TRAJECTORIES.partition_count(12) == 12
    assert CONTROL.partition_count(12) == 1


@by_name
def test_every_topic_is_used_by_a_room(topic: Topic) -> None:
    if absent := {*topic.writers, *topic.readers} - COMMANDS - {*role_names()}:
        pytest.skip(f"the feature with {', '.join(absent)} is not in this tree")
    assert topic.name.upper().replace("-", "_") in _topics_imported()


@cache
def _topics_imported() -> set[str]:
    """By name, all that some module of a room imports."""
    packages = ("producers", "consumers", "coordinator", "deploy")
    return {
        alias.name
        for package in packages
        for path in (ROOT / package).rglob("*.py")
        for node in ast.walk(parsed(path.read_text()))
        if isinstance(node, ast.ImportFrom) and node.module == "streamrl.schemas.topics"
        for alias in node.names
    }
