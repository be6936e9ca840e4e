import pytest

from benchmarks.pipeline.bounds.modes import one_step_async_s, stream_s, synchronous_s

BATCH = [(1.0, 10), (2.0, 10), (10.0, 20)]


def test_synchronous_trains_after_the_last_completion() -> None:
    assert synchronous_s([BATCH], 0.1) == pytest.approx(14.0)


def test_stream_hides_what_it_trains_before_the_last_completion() -> None:
    assert stream_s([BATCH], 0.1) == pytest.approx(12.0)


def test_one_step_async_takes_the_longer_of_generation_and_training() -> None:
    assert one_step_async_s([BATCH] * 50, 0.1) == pytest.approx(10.0)
    assert one_step_async_s([BATCH] * 50, 1.0) == pytest.approx(40.0)


def test_the_issues_ceilings_come_out() -> None:
    from benchmarks.pipeline.bounds.realised import ended, round_robin
    from benchmarks.pipeline.workload.workload import WORKLOADS

    work = WORKLOADS["a"]
    lengths = work.lengths(3 * work.groups_per_step, seed=1)
    batches = [
        ended(round_robin(lengths[start : start + 2048], work.workers, work.slots), work.curve)
        for start in range(0, len(lengths), 2048)
    ]
    base = synchronous_s(batches, work.train_s_per_token)
    assert base / (sum(lengths) / 3 / work.tokens_per_s) == pytest.approx(2.65, abs=0.06)
    assert base / stream_s(batches, work.train_s_per_token) == pytest.approx(1.60, abs=0.03)
    assert base / one_step_async_s(batches, work.train_s_per_token) == pytest.approx(1.61, abs=0.06)
