import json
from pathlib import Path

import numpy as np
import pytest

from benchmarks.transport.__main__ import main
from benchmarks.transport.report import BEGIN, END
from benchmarks.transport.round import PathName
from benchmarks.transport.servers import redis_server
from benchmarks.transport.workload import as_lists, as_message, as_record, ended_trajectories, index_of, to_arrays

KEYS = {"path", "tokens", "trajectories_per_s", "p50_ms", "p99_ms"}


def run(folder: Path, paths: list[PathName]) -> tuple[list[dict[str, float]], str]:
    readme = folder / "README.md"
    readme.write_text(f"before\n{BEGIN}\nold\n{END}\nafter\n")
    options = ["--count", "20", "--paced-count", "20", "--tokens", "200", "16000", "--repetitions", "1"]
    main([*options, "--paths", *paths, "--results", str(folder / "transport.json"), "--readme", str(readme)])
    return json.loads((folder / "transport.json").read_text()), readme.read_text()


@pytest.mark.kafka
def test_trajectories_go_through_kafka_and_files(tmp_path: Path) -> None:
    rows, readme = run(tmp_path, ["kafka", "files"])
    assert [(row["path"], row["tokens"]) for row in rows] == [
        (path, tokens) for tokens in (200, 16000) for path in ("kafka", "files")
    ]
    assert all(set(row) >= KEYS for row in rows)
    assert all(0 < row["p50_ms"] <= row["p99_ms"] and row["trajectories_per_s"] > 0 for row in rows)
    assert readme.startswith("before\n")
    assert readme.endswith("after\n")
    assert "old" not in readme
    assert "Seed 0" in readme
    assert (tmp_path / "transport.png").read_bytes().startswith(b"\x89PNG")


@pytest.mark.skipif(redis_server() is None, reason="redis-server is not installed")
def test_trajectories_go_through_redis(tmp_path: Path) -> None:
    rows, _ = run(tmp_path, ["redis"])
    assert [row["path"] for row in rows] == ["redis", "redis"]


def test_both_sides_carry_the_same_values() -> None:
    (ended, *_) = ended_trajectories(200, seed=3)
    message = as_message(ended, 21)
    ids, labels, logprobs = to_arrays(as_record(as_lists(ended), 21))
    assert index_of(message) == 21
    assert np.array_equal(ids, np.concatenate([message.prompt_token_ids, message.token_ids]))
    assert np.array_equal(labels[labels >= 0], message.token_ids)
    assert np.array_equal(logprobs, message.logprobs)
