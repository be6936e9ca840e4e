import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from benchmarks.transport.__main__ import main
from benchmarks.transport.round import OURS, PathName
from benchmarks.transport.servers import redis_server
from benchmarks.transport.workload import as_lists, as_message, as_record, ended_trajectories, index_of, to_arrays

SIZES = (200, 16000)
KEYS = {"path", "batching", "name", "tokens", "busy", "trajectories_per_s", "ratio", "p50_ms", "p99_ms"}


def run(folder: Path, paths: list[PathName]) -> list[dict[str, Any]]:
    options = ["--count", "40", "--paced-s", "0.1", "--tokens", "200", "16000", "--repetitions", "1", "--busy", "1"]
    rows = main([*options, "--paths", *paths, "--results", str(folder / "transport.json")])
    assert (folder / "transport.png").read_bytes().startswith(b"\x89PNG")
    found = json.loads((folder / "transport.json").read_text())
    assert found["rows"] == json.loads(json.dumps(rows))
    assert {"hardware", "versions", "seed", "load", "date", "batch_bytes"} <= set(found["conditions"])
    assert all(set(row) >= KEYS for row in rows)
    assert all(0 < row["p50_ms"] <= row["p99_ms"] and row["trajectories_per_s"] > 0 for row in rows)
    return rows


def kinds(rows: list[dict[str, Any]]) -> set[tuple[str, str, int, bool]]:
    return {(row["path"], row["batching"], row["tokens"], row["busy"]) for row in rows}


@pytest.mark.processes
def test_trajectories_go_through_kafka_and_files_singly_and_batched(tmp_path: Path) -> None:
    rows = run(tmp_path, ["kafka", "files"])
    every = {
        (path, batching, size) for path in ("kafka", "files") for batching in ("single", "batched") for size in SIZES
    }
    busy = {("kafka", "batched", 200, True), ("files", "single", 200, True)}
    assert kinds(rows) == {(*one, False) for one in every} | busy
    assert all(row["ratio"] == 1.0 for row in rows if (row["path"], row["batching"]) == OURS)
    assert all(row["ratio"] > 0 for row in rows)


@pytest.mark.skipif(redis_server() is None, reason="redis-server is not installed")
def test_trajectories_go_through_redis_singly_in_groups_and_batched(tmp_path: Path) -> None:
    rows = run(tmp_path, ["redis"])
    every = {("redis", batching, size, False) for batching in ("single", "group", "batched") for size in SIZES}
    assert kinds(rows) == every | {("redis", "single", 200, True)}
    assert all(row["ratio"] is None for row in rows)  # there is none of ours to compare with


def test_both_sides_carry_the_same_values() -> None:
    (ended, *_) = ended_trajectories(200, seed=3)
    message = as_message(ended, 21)
    ids, labels, logprobs = to_arrays(as_record(as_lists(ended), 21))
    assert index_of(message) == 21
    assert np.array_equal(ids, np.concatenate([message.prompt_token_ids, message.token_ids]))
    assert np.array_equal(labels[labels >= 0], message.token_ids)
    assert np.array_equal(logprobs, message.logprobs)
