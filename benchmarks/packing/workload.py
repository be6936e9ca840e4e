"""Trajectories of known lengths, in the random order in which a stream brings them."""

from dataclasses import dataclass
from random import Random

import numpy as np

from streamrl.consumers.batching.micro_batches import Sample, TrainingSample
from streamrl.producers.generation.engines.length_trace import LengthTraceSettings, trace_length
from streamrl.schemas.identifiers import PolicyVersion
from streamrl.schemas.reports import RecordRef
from streamrl.schemas.settings import LoopSettings
from streamrl.schemas.trajectories import FinishReason, Trajectory, VersionSpan

FIRST = PolicyVersion(1, 0)


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
        loop = LoopSettings(bucket_boundaries=self.boundaries, shards=1)
        found = [self._sample(index, loop) for index in range(self.samples)]
        Random(f"{self.name}/{seed}").shuffle(found)
        return found

    def _sample(self, index: int, loop: LoopSettings) -> TrainingSample:
        group = f"{self.name}/{index}/0"
        length = trace_length(self.lengths, group, 0, None)
        trajectory = Trajectory(
            trajectory_id=f"{group}/0",
            group_id=group,
            prompt_id=f"{self.name}/{index}",
            dataset=self.name,
            sample_index=0,
            num_generations=1,
            prompt_token_ids=np.ones(self.prompt, dtype="<i4"),
            token_ids=np.ones(length, dtype="<i4"),
            logprobs=np.full(length, -1.0, dtype="<f4"),
            loss_mask=np.ones(length, dtype="<u1"),
            version_spans=(VersionSpan(version=FIRST, start=0, end=length),),
            finish_reason=FinishReason.STOP,
            prompt_text="",
            completion_text="",
            rewards={"reward": 1.0},
            temperature=1.0,
            bucket=loop.bucket_of(length),
            predicted_length=length,
            worker_id="benchmark",
            attempt=0,
            admitted_version=FIRST,
            created_at=0.0,
            started_at=0.0,
            finished_at=0.0,
        )
        ref = RecordRef(trajectory.trajectory_id, loop.partition_of(trajectory.bucket, 0), index)
        return TrainingSample(Sample(trajectory, ref, 1.0, 0), 1.0)


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
