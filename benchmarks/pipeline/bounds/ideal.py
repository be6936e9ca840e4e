"""What a step of a case would take with perfect knowledge of its lengths and if nothing but decoding and training took
time: the quick calculation, on the very lengths that were measured. Pure.
"""

import numpy as np

from benchmarks.pipeline.bounds.modes import Ends, one_step_async_s, stream_s, synchronous_s
from benchmarks.pipeline.bounds.planned import planned
from benchmarks.pipeline.bounds.realised import ended, round_robin
from benchmarks.pipeline.cases import Case
from benchmarks.pipeline.running.recording import Recording


def ideal_step_s(case: Case, recording: Recording) -> float:
    """Emulated seconds. ``trajectory_async``: all slots, or the trainer, busy all the time."""
    work = case.workload
    first, count = case.warm_up * work.groups_per_step, case.steps * work.groups_per_step
    if case.mode == "trajectory_async":
        counted = np.isin(recording.trained_in, range(case.warm_up + 1, case.warm_up + case.steps + 1))
        tokens = float(recording.lengths[counted].sum()) / case.steps
        return tokens * max(1 / work.tokens_per_s, work.train_s_per_token)
    lengths = [int(length) for length in recording.lengths]
    if case.mode == "one_step_async":
        first, count = first - work.groups_per_step, count + work.groups_per_step
    batches = [
        batch_ends(case, lengths[start : start + work.groups_per_step])
        for start in range(first, first + count, work.groups_per_step)
    ]
    seconds = {"synchronous": synchronous_s, "stream": stream_s, "one_step_async": one_step_async_s}[case.mode]
    return seconds(batches, work.train_s_per_token)


def batch_ends(case: Case, lengths: list[int]) -> Ends:
    """When the completions of a batch end; a strategy that looks at lengths is told the real ones."""
    work = case.workload
    if case.dispatch == "round_robin":
        return ended(round_robin(lengths, work.workers, work.slots), work.curve)
    return ended(planned(case.dispatch, lengths, lengths, work.workers, work.slots, work.curve), work.curve)
