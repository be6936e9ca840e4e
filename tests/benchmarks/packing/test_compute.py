import copy

import pytest
import torch

from benchmarks.packing.compute import computed, loss_of
from benchmarks.packing.trial import at_random, streamed_packs, try_out_packed
from benchmarks.packing.workload import DEMO
from benchmarks.small_model import build
from streamrl.consumers.algorithms.losses import CompletionScorer
from streamrl.consumers.batching.settings import BatchingSettings
from streamrl.consumers.training.model import open_scorer
from streamrl.consumers.training.settings import TrainingSettings

SETTINGS = BatchingSettings(token_budget=600)


def test_packed_sequences_have_the_gradient_of_padded_ones() -> None:
    arrivals, model = DEMO.arrivals(0)[:12], build(positions=1024)
    other = copy.deepcopy(model)

    def gradient(of: torch.nn.Module, losses: list[torch.Tensor]) -> torch.Tensor:
        for loss in losses:
            loss.backward()
        return torch.cat([weight.grad.flatten() for weight in of.parameters() if weight.grad is not None])

    scorer, packed = CompletionScorer(model), open_scorer(other, TrainingSettings(packing="varlen"))
    padded = gradient(model, [loss_of(scorer, batch) for batch in at_random(arrivals, SETTINGS)])
    found = gradient(other, [loss_of(packed, pack) for pack in streamed_packs(arrivals, SETTINGS)])
    assert padded.norm() > 1.0
    assert (found - padded).norm() < 1e-4 * padded.norm()


def test_packs_hold_every_sample_once_within_the_budget_and_waste_only_launches() -> None:
    arrivals = DEMO.arrivals(1)
    packs = streamed_packs(arrivals, SETTINGS)
    packed = sorted(ref.trajectory_id for pack in packs for ref in pack.refs)
    assert packed == sorted(item.sample.ref.trajectory_id for item in arrivals)
    assert all(pack.num_tokens <= 600 or len(pack.refs) == 1 for pack in packs)
    waste = try_out_packed(arrivals, SETTINGS)
    assert waste.padding == 0
    assert waste.micro_batches == len(packs)
    assert waste.excess > 0


@pytest.mark.parametrize("repetitions", [1])
def test_ways_are_compared_with_packing(repetitions: int) -> None:
    rows = list(computed(build(positions=1024), DEMO.arrivals(0)[:8], SETTINGS, repetitions))
    assert [row["way"] for row in rows] == ["at random", "streamed", "whole batch", "packed"]
    assert all(row["cpu_seconds"] > 0 and row["tokens_per_cpu_second"] > 0 for row in rows)
    assert rows[-1]["over_packed"] == 0
