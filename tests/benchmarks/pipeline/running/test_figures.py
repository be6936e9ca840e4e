import numpy as np
import pytest

from benchmarks.pipeline.running.figures import figures, occupancy
from benchmarks.pipeline.running.recording import Recording
from schemas.identifiers import PolicyVersion
from schemas.reports import StepReport


def report(step: int, at: float) -> StepReport:
    return StepReport(
        algorithm="grpo",
        step=step,
        version=PolicyVersion(1, step),
        manifest_sha256=None,
        group_ids=(),
        micro_batches=(),
        metrics={"emulated/train_s": 5.0},
        sent_at=at,
    )


RECORDING = Recording(
    positions=np.arange(4),
    workers=np.array(["worker-0", "worker-0", "worker-0", "worker-1"]),
    lengths=np.array([10, 20, 30, 40]),
    predicted=np.ones(4, np.int64),
    created_at=np.array([0.0, 0.0, 1.0, 1.0]),
    started_at=np.array([0.0, 0.0, 1.0, 1.0]),
    finished_at=np.array([1.0, 2.0, 2.0, 2.0]),
    trained_in=np.array([1, 1, 2, 2]),
    reports=(report(0, 0.0), report(1, 1.0), report(2, 2.0)),
)


def test_rates_are_of_the_steps_after_the_warm_up_in_emulated_time() -> None:
    found = figures(RECORDING, warm_up=1, steps=1, slots=2, time_scale=10.0)
    assert found.trajectories_per_s == pytest.approx(0.2)
    assert found.tokens_per_s == pytest.approx(7.0)
    assert found.step_s == pytest.approx(10.0)
    assert found.generation_s == pytest.approx(10.0)
    assert found.trainer_busy == pytest.approx(0.5)


def test_what_waits_in_the_engine_does_not_count_as_running() -> None:
    busy = occupancy(RECORDING, 0.0, 2.0, bins=2, slots=1)
    assert busy["worker-0"].tolist() == [1.0, 1.0]
    assert busy["worker-1"].tolist() == [0.0, 1.0]
