"""The Python API on a run of real processes, and on a run that only left its files."""

import asyncio
import os
import tempfile
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.utils.data import DataLoader

import streamrl
from streamrl.api import settings_of
from streamrl.bus.embedded.cluster import start_cluster
from streamrl.bus.kafka.bus import KafkaBus
from streamrl.bus.kafka.settings import KafkaSettings
from streamrl.bus.kafka.topic_admin import apply_topics
from streamrl.bus.port import Outgoing
from streamrl.inspection.source import running_brokers
from streamrl.schemas.errors import SettingsError, UserError
from streamrl.schemas.topics import TRAJECTORIES
from streamrl.schemas.trajectories import Trajectory
from streamrl.settings.run_directory import RunDirectory
from tests.pipeline.letter_reward import share_of_a
from tests.pipeline.local_run import write_config
from tests.pipeline.tiny_model import save_tiny_model
from tests.progress import patience
from tests.schemas.examples import trajectory as example_trajectory

PARTITIONS = 4


def test_its_names_are_found() -> None:
    assert all(callable(getattr(streamrl, name)) for name in streamrl.__all__)
    with pytest.raises(AttributeError, match=r"it has .*Run"):
        _ = streamrl.runs


def test_settings_come_from_a_file_a_mapping_or_settings_with_overrides_on_top(tmp_path: Path) -> None:
    path = write_config(tmp_path, tmp_path / "model", "named")
    by_file = settings_of(path, {"loop__max_staleness": 1, "training": {"max_steps": 7, "learning_rate": 0.5}})
    assert (by_file.loop.max_staleness, by_file.training.max_steps, by_file.training.learning_rate) == (1, 7, 0.5)
    mapping = {"model": {"path": "m"}, "data": {"dataset": "chain_sum"}, "loop": {"bucket_boundaries": [4, 8]}}
    by_mapping = settings_of(mapping, {"run__directory": tmp_path, "kafka__bootstrap_servers": None})
    assert by_mapping.run.directory == tmp_path
    assert settings_of(by_mapping, {"run__seed": 3}).run.seed == 3
    with pytest.raises(SettingsError, match=r"loop\.max_stalenes"):
        settings_of(path, {"loop__max_stalenes": 1})
    with pytest.raises(UserError, match="section__key"):
        settings_of(path, {"loop": 1})


def test_a_reward_function_is_named_by_its_import_path() -> None:
    tree = {"model": {"path": "m"}, "data": {"path": "p"}, "run": {"name": "x"}, "rewards": {"functions": [share_of_a]}}
    path = "tests.pipeline.letter_reward:share_of_a"
    assert settings_of(tree, {}).rewards.functions == (path,)
    assert settings_of(tree, {"rewards__functions": [share_of_a, "a:b"]}).rewards.functions == (path, "a:b")
    with pytest.raises(SettingsError, match=r"can import for rewards\.functions, got .*<lambda>.* such as my_rewards"):
        settings_of(tree, {"rewards": {"functions": [lambda completions: [0.0]]}})


def test_a_run_that_is_not_there_is_refused(tmp_path: Path) -> None:
    with pytest.raises(UserError, match="which does not exist"):
        streamrl.Run(tmp_path / "no-run")


@pytest.mark.processes
async def test_a_run_with_its_own_broker_is_trained_read_audited_and_replayed_from_a_notebook(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The event loop of this test stands for a notebook's: the calls that block work beside it."""
    monkeypatch.setitem(os.environ, "OMP_NUM_THREADS", "1")
    config = write_config(tmp_path, save_tiny_model(tmp_path / "model"), "from-python")
    run = await streamrl.run_async(config, training__max_steps=5, run__workers=1)
    assert run.finished
    assert run.summary["steps"] == 5
    assert run.metrics["step"].to_pylist() == [1, 2, 3, 4, 5]
    assert run.model == tmp_path / "from-python" / "checkpoints" / "step_5"
    assert (run.model / "config.json").exists()
    kafka = RunDirectory(run.directory).kafka
    assert running_brokers([kafka / "node-1"]) is None, "it ends with the run"
    # As `streamrl kafka up` starts it again: once, where each call that reads would start one on a copy.
    with start_cluster(kafka, heap_mb=256):
        _check_its_records(run)
        _check_a_replay(run)
    again = streamrl.run(config, training__max_steps=5, run__workers=1)
    assert again.finished, "nothing to train is a good end"


def _check_its_records(run: streamrl.Run) -> None:
    trajectories = run.trajectories(tokens=True)
    assert run.audit().is_balanced
    assert run.audit().produced == trajectories.num_rows
    rows = trajectories.to_pylist()
    trained = [row for row in rows if row["step"] is not None]
    assert not [row for row in trained if row["skip_reason"] is not None], "one fate each"
    assert len(trained) + sum(row["skip_reason"] == "zero_advantage" for row in rows) == 5 * 4 * 4
    assert all((row["advantage"] is None) == (row["step"] is None) for row in rows)
    assert all(len(row["token_ids"]) == len(row["logprobs"]) == row["length"] for row in trained)
    steps = run.steps()
    assert steps["step"].to_pylist() == [1, 2, 3, 4, 5]
    assert sum(steps["trajectories"].to_pylist()) == len(trained)


def _check_a_replay(run: streamrl.Run) -> None:
    (replayed,) = run.replay(5)
    assert replayed.rebuilt.verdict == "bit-equal"
    (changed,) = run.replay(5, algorithm__epsilon_high=0.4)
    assert changed.what_if is not None


async def _filled(servers: str, run: str) -> list[Trajectory]:
    """A topic of four partitions with three trajectories in each."""
    await apply_topics(servers, run, PARTITIONS, 1, KafkaSettings(bootstrap_servers=servers))
    publisher = await KafkaBus(KafkaSettings(bootstrap_servers=servers)).publisher("test")
    written = []
    for number in range(3 * PARTITIONS):
        group = f"words/{number}/0"
        one = example_trajectory().model_copy(update={"group_id": group, "trajectory_id": f"{group}/0"})
        record = Outgoing.of(TRAJECTORIES.full_name(run), one, key=group, partition=number % PARTITIONS)
        await publisher.publish(record)
        written.append(one)
    await publisher.close()
    return written


@pytest.mark.processes
async def test_a_stream_goes_on_where_its_group_left_off_and_two_ranks_share(bootstrap_servers: str) -> None:
    written = {one.trajectory_id for one in await _filled(bootstrap_servers, "streamed")}

    async def read(count: int, rank: int = 0, world_size: int = 1, group: str = "mine") -> list[str]:
        trajectories = streamrl.stream(
            "streamed",
            start="committed",
            group=group,
            rank=rank,
            world_size=world_size,
            bootstrap_servers=bootstrap_servers,
        )
        found: list[str] = []
        async with patience(30):
            while len(found) < count:
                found.append((await anext(trajectories)).trajectory_id)
            await trajectories.aclose()
        return found

    first = await read(5)
    rest = await read(len(written) - 4)  # the fifth was not known to be done with when the reader went away
    assert set(first) | set(rest) == written
    assert set(first) & set(rest) == {first[-1]}
    shares = [set(await read(6, rank, 2, "shared")) for rank in (0, 1)]
    assert shares[0] | shares[1] == written
    assert not shares[0] & shares[1]


@pytest.mark.processes
async def test_a_data_loader_of_two_workers_gets_every_trajectory_once(
    bootstrap_servers: str, monkeypatch: pytest.MonkeyPatch, tmp_path_factory: pytest.TempPathFactory
) -> None:
    # torch's workers leave the directory of the sockets through which they hand tensors over. The path is short, for a
    # socket's has at most 107 bytes.
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path_factory.mktemp("t")))
    written = {one.trajectory_id: one for one in await _filled(bootstrap_servers, "loaded")}

    def load() -> list[dict[str, Any]]:
        dataset = streamrl.TrajectoryDataset("loaded", group="loader", bootstrap_servers=bootstrap_servers)
        loader = DataLoader(dataset, batch_size=None, num_workers=2)
        examples = iter(loader)
        return [next(examples) for _ in range(len(written))]

    examples = await asyncio.to_thread(load)
    assert sorted(str(example["trajectory_id"]) for example in examples) == sorted(written)
    one = examples[0]
    source = written[str(one["trajectory_id"])]
    assert torch.equal(one["completion_ids"], torch.tensor(source.token_ids, dtype=torch.int64))
    assert one["sampling_per_token_logps"].shape == one["completion_mask"].shape == one["completion_ids"].shape


async def test_a_rank_beyond_its_world_is_refused() -> None:
    with pytest.raises(UserError, match="rank < world_size"):
        await anext(streamrl.stream("x", rank=2, world_size=2))
    with pytest.raises(UserError, match="group"):
        await anext(streamrl.stream("x", start="committed"))
