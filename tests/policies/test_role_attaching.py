"""An attached instance combines the run's settings, its algorithm's preset and its own earlier settings."""

import asyncio
import time
from datetime import datetime
from pathlib import Path

import pytest

from streamrl.bus.kafka.bus import KafkaBus
from streamrl.bus.kafka.settings import KafkaSettings
from streamrl.bus.kafka.topic_admin import apply_topics, topics_of_scope
from streamrl.bus.port import Outgoing
from streamrl.consumers.ingest.settings import offsets_in
from streamrl.deploy.wiring.process import require_run_role
from streamrl.inspection.diagnostics.connect import RunConnection, runs_of
from streamrl.policies.role_attaching import (
    AttachRequest,
    InstanceStatus,
    instance_settings,
    keep_settings,
    place_in_the_stream,
    status_lines,
)
from streamrl.schemas.errors import SettingsError, UserError
from streamrl.schemas.topics import CATALOGUE, INSTANCE_TOPICS, STEPS, TRAJECTORIES
from streamrl.settings.loading import as_toml, load_settings
from streamrl.settings.run_directory import RunDirectory
from streamrl.settings.tree import Settings


@pytest.fixture
def run(tmp_path: Path) -> Path:
    """A run's directory, as `streamrl run` leaves it."""
    given = ["--run.name=demo", f"--run.directory={tmp_path}", "--data.dataset=chain_sum", "--model.path=m"]
    given += ["--algorithm.epsilon=0.3", "--training.checkpoint_location=s3://bucket/demo", "--training.max_steps=7"]
    settings = load_settings(None, given)
    directory = RunDirectory(settings.run.path)
    directory.create()
    directory.write_config(as_toml(settings))
    return directory.path


def attached(run: Path, **request: object) -> Settings:
    connection = RunConnection(KafkaSettings(bootstrap_servers="127.0.0.1:1"), "demo")
    settings = instance_settings(connection, run, AttachRequest("second", **request))  # type: ignore[arg-type]
    keep_settings(settings)
    return settings


def test_an_instance_has_the_runs_settings_the_preset_of_its_algorithm_and_places_of_its_own(run: Path) -> None:
    settings = attached(run, algorithm="rloo", begin="beginning", changes=("training.max_steps=9",))
    assert (settings.algorithm.name, settings.algorithm.epsilon) == (
        "rloo",
        Settings.model_validate({"data": {"dataset": "chain_sum"}, "algorithm": {"name": "rloo"}}).algorithm.epsilon,
    )
    assert (settings.run.instance, settings.run.path) == ("second", run / "instances" / "second")
    assert settings.training.checkpoint_location == "s3://bucket/demo/instances/second"
    assert (settings.training.max_steps, settings.ingest.attach_from) == (9, "beginning")
    assert settings.kafka.bootstrap_servers is None  # the address is looked up at each start


async def test_a_place_in_the_stream_is_a_word_an_offset_or_a_time(run: Path, bootstrap_servers: str) -> None:
    connection = RunConnection(KafkaSettings(bootstrap_servers=bootstrap_servers), f"demo{time.time_ns()}")
    topic = TRAJECTORIES.full_name(connection.run)
    partitions = load_settings(run / "config.resolved.toml", [], to_look=True).loop.trajectory_partitions
    await apply_topics(bootstrap_servers, connection.run, partitions, 1, connection.kafka)
    publisher = await KafkaBus(connection.kafka).publisher("test")
    await publisher.publish(Outgoing(topic, b"x", None, partition=1))
    await asyncio.sleep(0.05)
    between = datetime.fromtimestamp(time.time()).isoformat()
    await asyncio.sleep(0.05)
    await publisher.publish(Outgoing(topic, b"x", None, partition=1))
    await publisher.close()
    for text in ("now", "beginning", "0=3,1=4"):
        assert await place_in_the_stream(text, connection, run) == text
    every = range(partitions)
    assert await place_in_the_stream("7", connection, run) == ",".join(f"{number}=7" for number in every)
    found = {text: offsets_in(await place_in_the_stream(text, connection, run)) for text in ("10m", "0.000001s")}
    assert found["10m"] == dict.fromkeys(every, 0)
    assert found["0.000001s"] == dict.fromkeys(every, 0) | {1: 2}
    assert offsets_in(await place_in_the_stream(between, connection, run))[1] == 1
    with pytest.raises(UserError, match="expected a time such as"):
        await place_in_the_stream("later", connection, run)


def test_attached_again_it_goes_on_with_what_it_had(run: Path) -> None:
    before = attached(run, algorithm="rloo", begin="beginning", changes=("training.max_steps=9",))
    assert attached(run) == before


def test_without_another_algorithm_it_has_that_of_the_run(run: Path) -> None:
    assert attached(run).algorithm.epsilon == 0.3


def test_an_instance_does_not_inherit_the_runs_order_of_groups(run: Path) -> None:
    directory = RunDirectory(run)
    settings = load_settings(directory.config, ["--ingest.sampling=freshest", "--ingest.passed_over=skip"])
    directory.write_config(as_toml(settings))
    assert load_settings(directory.config, []).ingest.sampling == "freshest"
    assert attached(run).ingest == attached(run).ingest.model_copy(update={"sampling": "oldest"})
    with pytest.raises(SettingsError, match=r'no ingest.sampling with run.instance = "second" \(only the served'):
        attached(run, changes=("ingest.sampling=freshest",))


@pytest.mark.parametrize("name", ["policy", "grpo"])
def test_a_name_that_is_the_run_trainers_is_refused(run: Path, name: str) -> None:
    connection = RunConnection(KafkaSettings(bootstrap_servers="127.0.0.1:1"), "demo")
    with pytest.raises(UserError, match=f"expected an instance name that differs from .*, got '{name}'"):
        instance_settings(connection, run, AttachRequest(name))


def test_an_override_without_a_value_is_refused(run: Path) -> None:
    with pytest.raises(UserError, match=r"expected section.key=value, got 'max_steps'"):
        attached(run, changes=("max_steps",))


def test_only_a_trainer_may_carry_an_instances_name(run: Path) -> None:
    settings = attached(run)
    require_run_role(settings, "trainer")
    with pytest.raises(SettingsError, match=r"expected run.instance to be 'policy' for a worker, got 'second'"):
        require_run_role(settings, "worker")
    with pytest.raises(SettingsError, match=r"expected a name without '.policy.'"):
        load_settings(None, ["--run.name=demo.policy.second", "--data.dataset=chain_sum", "--model.path=m"])


def test_an_instance_shares_the_stream_and_is_found_as_a_part_of_its_run() -> None:
    scope = "demo.policy.second"
    assert (STEPS.full_name(scope), TRAJECTORIES.full_name(scope)) == (f"{scope}.steps", "demo.trajectories")
    topics = {topic.full_name("demo") for topic in CATALOGUE} | {topic.full_name(scope) for topic in INSTANCE_TOPICS}
    assert runs_of(topics) == ["demo", scope]
    # Deleting an instance's topics keeps the topics that it shares with its run.
    assert topics_of_scope(scope) == INSTANCE_TOPICS
    assert topics_of_scope("demo") == CATALOGUE


def test_the_status_is_a_table() -> None:
    rows = [
        InstanceStatus("policy", "grpo", "run", True, True, "1-9", 9, 0.5, 1.0, 3),
        InstanceStatus("second", "rloo", "pause", False, False),
    ]
    head, served, second = status_lines(rows)
    assert head.split() == ["instance", "algorithm", "mode", "alive", "version", "reward", "age", "lag"]
    assert served.split() == ["policy", "(served)", "grpo", "run", "yes", "1-9", "0.5", "1", "3"]
    assert second.split() == ["second", "rloo", "pause", "no", "-", "-", "-", "-"]
