from dataclasses import replace
from pathlib import Path

import pytest

from benchmarks.pipeline.bounds.ideal import ideal_step_s
from benchmarks.pipeline.cases import Case, Mode
from benchmarks.pipeline.running.figures import figures
from benchmarks.pipeline.virtual import TIME_SCALE, run_virtually
from benchmarks.pipeline.workload.prompts import write_prompts
from benchmarks.pipeline.workload.workload import WORKLOADS

WORK = replace(WORKLOADS["a"], groups_per_step=128, workers=2, slots=16, cap=4000)


def step_s(mode: Mode, tmp_path: Path) -> tuple[float, float]:
    """Measured in virtual time, and calculated."""
    case = Case(WORK, mode, "round_robin", warm_up=1, steps=2)
    write_prompts(tmp_path / "prompts.jsonl", WORK, 3 * WORK.groups_per_step, seed=0)
    recording = run_virtually(case, tmp_path / "prompts.jsonl", steps=3, seed=0)
    assert recording.trained_in.tolist().count(1) == WORK.groups_per_step
    found = figures(recording, warm_up=1, steps=2, slots=WORK.slots, time_scale=TIME_SCALE)
    return found.step_s, ideal_step_s(case, recording)


@pytest.mark.parametrize("mode", ["synchronous", "stream"])
def test_without_latencies_the_real_parts_take_about_as_long_as_was_calculated(mode: Mode, tmp_path: Path) -> None:
    measured, calculated = step_s(mode, tmp_path)
    assert measured == pytest.approx(calculated, rel=0.1)


def test_a_batch_that_begins_before_the_last_one_ended_is_faster_than_was_calculated(tmp_path: Path) -> None:
    measured, calculated = step_s("one_step_async", tmp_path)
    assert measured < calculated
