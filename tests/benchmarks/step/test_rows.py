from collections import Counter

import pytest

from benchmarks.step.__main__ import rows_of, sequences_at_once, table_of
from benchmarks.step.limits import MatmulTimes, StepTokens, limits_of
from benchmarks.step.recording import Recorded, Window, by_phase, name_of

TOKENS = StepTokens(prefilled=100.0, decoded=200.0, computed=300.0, scored=200.0, sequences=4, context=16)


def test_a_process_spends_by_the_shares_of_its_samples() -> None:
    spent = {1: ("worker", 3.0), 2: ("broker", 5.0), 3: ("worker", 1.0), 4: ("relay", 0.5)}
    samples = {1: Counter({"sampling": 1, "codec": 2}), 3: Counter({"codec": 4})}
    expected = {
        ("worker", "sampling"): 1.0,
        ("worker", "codec"): 3.0,
        ("broker", "broker"): 5.0,
        ("relay", "other"): 0.5,
    }
    assert by_phase(spent, samples) == pytest.approx(expected)


def test_a_process_is_named_by_its_role() -> None:
    python = ["/venv/bin/python", "-P", "-m"]
    assert name_of("python", [*python, "streamrl", "worker", "run.toml", "--id", "worker-0"]) == "worker"
    assert name_of("python", [*python, "streamrl.producers.rewards.child", "exact_match"]) == "rewards"
    assert name_of("java", ["java", "kafka.Kafka"]) == "broker"
    assert name_of("nginx", ["nginx"]) == "nginx"


def test_the_limit_is_that_of_the_better_precision() -> None:
    fast_decode = MatmulTimes(decode_ms=1.0, layers_ms=0.02, head_ms=0.01)
    fast_training = MatmulTimes(decode_ms=2.0, layers_ms=0.01, head_ms=0.01)
    found = limits_of([fast_decode, fast_training], TOKENS)
    assert found == pytest.approx({"prefill": 0.001, "decode matmuls": 0.05, "forward": 0.005, "backward": 0.01})


def test_rows_have_the_published_form_and_keep_every_second() -> None:
    steady = Window(2, 0.0, 4.0, {("worker", "decode matmuls"): 4.0, ("worker", "codec"): 0.0002}, 1.0)
    start = Window(1, 0.0, 9.0, {("worker", "imports"): 6.0}, 2.0)
    rows = list(rows_of("demo", Recorded(start, steady, first=4), {"decode matmuls": 1.5}))
    assert all(set(row) == {"model", "part", "process", "phase", "cpu_s", "limit_s"} for row in rows)
    seconds = {(row["part"], row["phase"]): (row["cpu_s"], row["limit_s"]) for row in rows}
    assert seconds["step", "decode matmuls"] == (2.0, 1.5)
    assert seconds["step", "other"] == (pytest.approx(0.0001), None)
    assert seconds["start", "imports"] == (6.0, None)
    assert seconds["step", "idle"] == (0.5, None)
    assert "generation: 2000.0, 1.33 x its matmuls" in "\n".join(table_of("demo", rows))


def test_sequences_at_once_are_those_in_slots_of_workers_that_sample() -> None:
    window = Window(1, 0.0, 10.0, {}, 0.0)
    rows = [{"worker_id": "a", "started_at": 0.0, "finished_at": 5.0} for _ in range(6)]
    assert sequences_at_once(rows, 4, window) == 4
    assert sequences_at_once([*rows, {"worker_id": "b", "started_at": 0.0, "finished_at": 5.0}], 8, window) == 3.5
