from collections import Counter

import pytest

from benchmarks.step.__main__ import phases_of, rows_of, table_of, tokens_of
from benchmarks.step.limits import MatmulTimes, StepTokens, limits_of
from benchmarks.step.recording import Recorded, Spent, Window, by_phase, name_of
from streamrl.settings.loading import load_settings

TOKENS = StepTokens(prefilled=100.0, decoded=200.0, computed=300.0, scored=200.0, sequences=4, context=16)


def test_a_thread_spends_by_the_shares_of_its_samples() -> None:
    spent = [
        Spent("worker", 6.0, {11: 3.0, 12: 1.0, 13: 2.0}),  # 13 has no Python code: it works for 11, the busiest
        Spent("broker", 5.0, {21: 5.0}),
        Spent("relay", 0.5, {}),
    ]
    samples = {11: Counter({"sampling": 1, "decode matmuls": 4}), 12: Counter({"codec": 7})}
    assert by_phase(spent, samples) == pytest.approx(
        {
            ("worker", "sampling"): 1.0,
            ("worker", "decode matmuls"): 4.0,
            ("worker", "codec"): 1.0,
            ("broker", "broker"): 5.0,
            ("relay", "other"): 0.5,
        }
    )


def test_what_was_spent_before_does_not_count() -> None:
    before = Spent("worker", 4.0, {1: 3.0})
    assert Spent("worker", 6.0, {1: 4.0, 2: 1.0}).since(before) == Spent("worker", 2.0, {1: 1.0, 2: 1.0})


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
    assert list(phases_of(rows)) == [
        {"model": "demo", "phase": "decode matmuls", "cpu_ms": 2000.0, "limit_ms": 1500.0},
        {"model": "demo", "phase": "other", "cpu_ms": pytest.approx(0.1), "limit_ms": None},
    ]
    assert "generation: 2000.0, 1.33 x its matmuls" in "\n".join(table_of("demo", rows))


def test_a_step_computes_what_its_figures_say() -> None:
    # 16 samples with prompts of 10 tokens and completions of 5; half of the groups earned the same.
    means = {
        "ledger/trained": 16.0,
        "training_tok/s": 120.0,
        "time/step": 2.0,
        "tokens/trained": 80.0,
        "tokens/computed": 40.0,
        "completions/mean_length": 5.0,
        "frac_reward_zero_std": 0.5,
    }
    settings = load_settings(
        None,
        [],
        {
            "run": {"name": "a", "workers": 2},
            "model": {"path": "m"},
            "data": {"path": "d"},
            "rewards": {"functions": ["exact_match"]},
            "loop": {"groups_per_step": 2, "num_generations": 8, "max_staleness": 3},
            "generation": {"max_num_seqs": 64},
        },
    )
    assert tokens_of(means, settings) == StepTokens(
        prefilled=20.0, decoded=80.0, computed=120.0, scored=40.0, sequences=32, context=12
    )
    shared = settings.model_copy(update={"training": settings.training.model_copy(update={"packing": "shared"})})
    assert tokens_of(means, shared).computed == 50.0
