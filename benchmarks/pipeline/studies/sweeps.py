"""How much each mode gains as the workload changes: in virtual time, plans executed to the letter. Pure.

One quantity at a time is varied around workload a with 1,024 prompts a step: skew, workers (with prompts in
proportion), and training time per token. All with perfect knowledge; what an erring ranker costs is in ``ranking.py``.
"""

from collections.abc import Iterator
from dataclasses import replace

from benchmarks.pipeline.bounds.modes import Ends, one_step_async_s, stream_s, synchronous_s
from benchmarks.pipeline.bounds.planned import planned
from benchmarks.pipeline.bounds.realised import ended, round_robin
from benchmarks.pipeline.results import Row
from benchmarks.pipeline.workload.workload import WORKLOADS, Workload

BASE = replace(WORKLOADS["a"], groups_per_step=1024)
SKEWS = (2.0, 5.0, 10.0, 20.0, 30.0)
FLEETS = (2, 4, 8, 16, 32)
TRAIN_RATIOS = (0.25, 0.5, 1.0, 2.0, 4.0)
MODES = {"synchronous": synchronous_s, "stream": stream_s, "one_step_async": one_step_async_s}
DISPATCH = ("round_robin", "lpt", "skewness_aware")


def sweep(batches: int, seed: int) -> list[Row]:
    """All rows."""
    return [row for work in _workloads() for row in _rows(work, batches, seed)]


def _workloads() -> Iterator[Workload]:
    for skew in SKEWS:
        yield replace(BASE, name=f"sweep/p99_over_median={skew:g}", p99_over_median=skew)
    for workers in FLEETS:
        yield replace(BASE, name=f"sweep/workers={workers}", workers=workers, groups_per_step=128 * workers)
    for ratio in TRAIN_RATIOS:
        yield replace(BASE, name=f"sweep/train_over_generate={ratio:g}", train_ratio=ratio)


def _rows(work: Workload, count: int, seed: int) -> list[Row]:
    lengths = work.lengths(work.groups_per_step * count, seed)
    batches = [lengths[start : start + work.groups_per_step] for start in range(0, len(lengths), work.groups_per_step)]
    ends = {dispatch: [_ends(work, dispatch, batch) for batch in batches] for dispatch in DISPATCH}
    busy_s = sum(lengths) / count * max(1 / work.tokens_per_s, work.train_s_per_token)
    base_s = synchronous_s(ends["round_robin"], work.train_s_per_token)
    rows = [
        _row(work, mode, dispatch, seconds(ends[dispatch], work.train_s_per_token), base_s, busy_s)
        for mode, seconds in MODES.items()
        for dispatch in DISPATCH
    ]
    return [*rows, _row(work, "trajectory_async", "any", busy_s, base_s, busy_s)]


def _ends(work: Workload, dispatch: str, lengths: list[int]) -> Ends:
    if dispatch == "round_robin":
        return ended(round_robin(lengths, work.workers, work.slots), work.curve)
    return ended(planned(dispatch, lengths, lengths, work.workers, work.slots, work.curve), work.curve)


def _row(work: Workload, mode: str, dispatch: str, step_s: float, base_s: float, busy_s: float) -> Row:
    return {
        "workload": work.name,
        "mode": mode,
        "dispatch": dispatch,
        "ranker": "none" if dispatch in ("round_robin", "any") else "perfect",
        "kind": "virtual",
        "trajectories_per_s": work.groups_per_step / step_s,
        "ratio_to_synchronous": base_s / step_s,
        "ratio_to_bound": busy_s / step_s,
        "bound": base_s / busy_s,
        "step_s": step_s,
    }
