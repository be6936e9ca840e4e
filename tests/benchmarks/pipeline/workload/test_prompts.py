import json
import math
import statistics
from pathlib import Path

import pytest

from benchmarks.pipeline.workload.prompts import write_prompts
from benchmarks.pipeline.workload.workload import WORKLOADS

WORK = WORKLOADS["a"]


def test_lengths_have_the_workloads_median_tail_and_cap(tmp_path: Path) -> None:
    write_prompts(tmp_path / "prompts.jsonl", WORK, 20_000, seed=0)
    lengths = sorted(json.loads(line)["length"] for line in (tmp_path / "prompts.jsonl").read_text().splitlines())
    assert lengths[10_000] == pytest.approx(1000, rel=0.04)
    assert lengths[19_600] == pytest.approx(1000 * math.exp(2.054 * WORK.sigma), rel=0.08)
    assert lengths[-1] == WORK.cap
    assert statistics.fmean(lengths) == pytest.approx(1580, rel=0.04)


def test_the_same_seed_gives_the_same_prompts(tmp_path: Path) -> None:
    for name in ("one", "other"):
        write_prompts(tmp_path / name, WORK, 10, seed=3)
    assert (tmp_path / "one").read_text() == (tmp_path / "other").read_text()
