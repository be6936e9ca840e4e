import random

from benchmarks.pipeline.bounds.planned import noisy, planned
from benchmarks.pipeline.bounds.realised import makespan, round_robin
from benchmarks.pipeline.workload.workload import WORKLOADS

WORK = WORKLOADS["a"]


def test_every_completion_is_in_one_queue() -> None:
    lengths = WORK.lengths(256, seed=0)
    queues = planned("skewness_aware", lengths, noisy(lengths, 0.5, random.Random(0)), 4, 16, WORK.curve)
    assert sorted(length for queue in queues for length in queue.lengths) == sorted(lengths)


def test_perfect_knowledge_beats_round_robin() -> None:
    lengths = WORK.lengths(1024, seed=0)
    base = makespan(round_robin(lengths, 4, 64), WORK.curve)
    assert makespan(planned("skewness_aware", lengths, lengths, 4, 64, WORK.curve), WORK.curve) < 0.9 * base
