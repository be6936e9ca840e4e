"""Trajectories of known lengths, in the random order in which a stream brings them."""

from dataclasses import dataclass
from random import Random

import numpy as np

from benchmarks.completed import completed
from streamrl.consumers.batching.micro_batches import Sample, TrainingSample
from streamrl.producers.generation.engines.length_trace import LengthTraceSettings, trace_length
from streamrl.schemas.reports import RecordRef
from streamrl.schemas.settings import LoopSettings
from streamrl.schemas.trajectories import Trajectory


@dataclass(frozen=True)
class Workload:
    """``samples`` completions of one step; ``boundaries`` part the length buckets."""

    name: str
    samples: int
    prompt: int
    lengths: LengthTraceSettings
    token_budgets: tuple[int, ...]
    boundaries: tuple[int, ...]

    def arrivals(self, seed: int) -> list[TrainingSample]:
        """All of them, in an order drawn from the seed; the completions are the same for each seed."""
        loop = LoopSettings(bucket_boundaries=self.boundaries)
        found = [self._sample(index, loop) for index in range(self.samples)]
        Random(f"{self.name}/{seed}").shuffle(found)
        return found

    def _sample(self, index: int, loop: LoopSettings) -> TrainingSample:
        group = f"{self.name}/{index}/0"
        length = trace_length(self.lengths, group, 0, None)
        prompt, tokens = np.ones(self.prompt, dtype="<i4"), np.ones(length, dtype="<i4")
        told = {"rewards": {"reward": 1.0}, "bucket": loop.bucket_of(length)}
        logprobs = np.full(length, -1.0, dtype="<f4")
        trajectory = Trajectory(**completed(group, 0, prompt, tokens, logprobs, **told))
        ref = RecordRef(trajectory.trajectory_id, loop.partition_of(trajectory.bucket, 0), index)
        return TrainingSample(Sample(trajectory, ref, 1.0), 1.0)


DEMO = Workload(
    "demo",
    512,
    prompt=20,
    lengths=LengthTraceSettings(median_tokens=60, p99_over_median=8, max_tokens=512),
    token_budgets=(4096,),
    boundaries=(32, 64, 128, 256),
)
WORKLOADS = (
    Workload(
        "lognormal",
        2048,
        prompt=100,
        lengths=LengthTraceSettings(median_tokens=1000, p99_over_median=10, max_tokens=10_000),
        token_budgets=(16_384, 32_768, 65_536),
        boundaries=(500, 1000, 2000, 4000),
    ),
    Workload(
        "streamrl",
        1024,
        prompt=100,
        lengths=LengthTraceSettings(source="histogram"),
        token_budgets=(32_768, 65_536),
        boundaries=(1500, 3000, 6000, 12_000),
    ),
    DEMO,
)
