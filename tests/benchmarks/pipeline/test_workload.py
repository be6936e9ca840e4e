import json
import math
import random
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from benchmarks.pipeline.cases import A, Case, configuration
from benchmarks.pipeline.paper import Noise, Queue, draw, finish_times, makespan, planned, round_robin
from benchmarks.pipeline.workload import PUBLISHED_RECALL, Workload, paper_noise, recall
from streamrl.schemas.profiles import DecodeCurve, DecodeSettings

CURVE = DecodeCurve(DecodeSettings(step_s=1.0, batch_scale=1.0))
GROUPED = Workload(name="g", samples=64, group=8)


def written(work: Workload, path: Path, count: int) -> list[dict[str, Any]]:
    work.write_prompts(path, count, seed=0)
    return [json.loads(line) for line in path.read_text().splitlines()]


def test_lengths_have_the_workloads_median_and_tail_and_the_prompt_states_none(tmp_path: Path) -> None:
    rows = written(A, tmp_path / "prompts.jsonl", 20_000)
    lengths = sorted(row["length"][0] for row in rows)
    assert lengths[10_000] == pytest.approx(1000, rel=0.06)
    assert lengths[19_600] == pytest.approx(1000 * math.exp(2.054 * A.sigma), rel=0.1)
    assert not any(letter.isdecimal() for row in rows for letter in str(row["prompt"]))
    # Few wordings, so that nobody can tell a prompt by its text.
    assert len({row["prompt"] for row in rows}) < 2000


def test_samples_of_a_group_differ_less_than_prompts_do(tmp_path: Path) -> None:
    rows = written(GROUPED, tmp_path / "prompts.jsonl", 2000)
    scores = np.log([row["length"] for row in rows])
    assert scores.shape == (2000, 8)
    shared = scores.mean(axis=1).var() / scores.var()
    assert shared == pytest.approx(0.8 + 0.2 / 8, abs=0.04)


def test_the_degraded_oracle_has_the_published_recall_of_the_longest_fifth() -> None:
    rng = np.random.default_rng(7)
    lengths = np.array([A.length(score) for score in rng.standard_normal(20_000)])
    told = lengths * np.exp(paper_noise(A) * rng.standard_normal(20_000))
    assert recall(lengths, told, 0.2) == pytest.approx(PUBLISHED_RECALL[0.2], abs=0.01)
    # The paper's ranker loses more towards the end of the tail than an error that is the same at all lengths.
    assert recall(lengths, told, 0.05) == pytest.approx(PUBLISHED_RECALL[0.05], abs=0.06)


def test_a_case_becomes_settings(tmp_path: Path) -> None:
    case = Case(GROUPED, "stream", "skewness_aware", "paper_recall")
    settings = configuration(case, run="x", directory=tmp_path, prompts=tmp_path / "p", address="nowhere:1", seed=0)
    assert (settings.loop.groups_per_step, settings.loop.num_generations) == (8, 8)
    assert settings.lengths.predictor == "trace"
    assert settings.emulation.lengths.prediction_noise == pytest.approx(paper_noise(GROUPED))
    assert settings.emulation.training.export_s > 0
    assert settings.emulation.decode.prefill_s_per_token > 0


def test_the_histogram_has_the_papers_quantiles() -> None:
    lengths = sorted(draw(random.Random(0), 50_000))
    assert lengths[25_000] == pytest.approx(3206, rel=0.03)
    assert lengths[45_000] == pytest.approx(12_940, rel=0.05)
    assert sum(lengths) / len(lengths) == pytest.approx(4934, rel=0.05)


def test_noise_costs_recall_and_keeps_the_lengths() -> None:
    lengths = draw(random.Random(0))
    assert recall(lengths, Noise(0.0, 0.0).ranked(lengths, random.Random(1)), 0.2) == 1.0
    estimates = Noise(0.5, 0.0).ranked(lengths, random.Random(1))
    assert 0.5 < recall(lengths, estimates, 0.2) < 0.9
    assert sorted(estimates) == sorted(lengths)


def test_a_queue_ends_as_its_batch_decodes() -> None:
    assert finish_times(Queue((2, 4), slots=2), CURVE) == pytest.approx([6.0, 10.0])
    assert finish_times(Queue((2, 4), slots=1), CURVE) == pytest.approx([4.0, 12.0])
    assert round_robin([1, 2, 3, 4, 5], workers=2, slots=8) == [Queue((1, 3, 5), 8), Queue((2, 4), 8)]


def test_a_plan_loses_nothing_and_perfect_knowledge_beats_round_robin() -> None:
    rng = random.Random(0)
    lengths = [A.length(rng.gauss(0.0, 1.0)) for _ in range(1024)]
    queues = planned("skewness_aware", lengths, lengths, 4, 64, A.curve)
    assert sorted(length for queue in queues for length in queue.lengths) == sorted(lengths)
    assert makespan(queues, A.curve) < 0.9 * makespan(round_robin(lengths, 4, 64), A.curve)
