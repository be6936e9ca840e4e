"""What no dispatch can beat: the least seconds of a step in each mode, from the very lengths that were sampled. Pure.

With, of a step's completions,

- G: their tokens at the rate of all slots busy, Σ L / Σ over workers of slots / t(slots), and their prefills;
- A: the longest of them alone in its batch from the start, L × t(1), on the fastest worker;
- T: forward and backward of all of them; O: the optimizer step; E: the export; W: the stall of a worker that adopts;

a step lasts at least

    synchronous        max(G, A) + T + O + E + W     one after the other
    stream             max(G, A, T) + O + E + W      training overlaps generation, new weights wait for both
    one_step_async     max(G + W, T + O + E, (W + A + O + E) / 2)
    trajectory_async   max(G + W, T + O + E, (W + A + O + E) / (η + 1))

In the last two the stages overlap altogether. Nothing waits for a batch: a group may begin as soon as the weights of
two steps ago (η + 1 of them, with staleness η) are there, and must have ended when its step is taken. So two steps, or
η + 1, last at least as long as one completion. Where t is affine, slots / t(slots) grows with the slots, and no smaller
batch has a higher rate.

These bounds know no window: a stretch of a few steps may hold tokens that were sampled before it began.
"""

import numpy as np

from benchmarks.pipeline.cases import Case
from benchmarks.pipeline.recording import Recording


def least_step_s(case: Case, recording: Recording) -> float:
    """Emulated seconds a step, of the measured steps."""
    work = case.workload
    steps = range(case.warm_up + 1, case.warm_up + case.steps + 1)
    counted = np.isin(recording.trained_in, steps)
    lengths, prompts = recording.lengths[counted], recording.prompts[counted]
    prefill_s = float(sum(map(work.curve.prefill_s, prompts.tolist()))) / sum(work.speeds)
    generate_s = (float(lengths.sum()) / work.tokens_per_s + prefill_s) / case.steps
    longest = np.mean([recording.lengths[recording.trained_in == step].max() for step in steps])
    alone_s = float(longest) * work.curve.batch_s(1) / max(work.speeds)
    train_s = work.train_s_per_token * float(lengths.sum() + prompts.sum()) / case.steps
    after_s, adopt_s = work.optimizer_s + work.export_s, work.decode.adopt_s
    match case.mode:
        case "synchronous":
            return max(generate_s, alone_s) + train_s + after_s + adopt_s
        case "stream":
            return max(generate_s, alone_s, train_s) + after_s + adopt_s
        case "one_step_async":
            overlapped = 2
        case "trajectory_async":
            overlapped = work.max_staleness + 1
    return max(generate_s + adopt_s, train_s + after_s, (adopt_s + alone_s + after_s) / overlapped)
