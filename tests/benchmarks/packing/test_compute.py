import pytest
import torch

from benchmarks.packing.compute import PackedModel, computed, padded_loss
from benchmarks.packing.trial import at_random, try_out_packed, varlen_packs
from benchmarks.packing.workload import DEMO
from benchmarks.small_model import build
from consumers.algorithms.losses import CompletionScorer
from consumers.batching.settings import BatchingSettings

SETTINGS = BatchingSettings(token_budget=600)


def test_packed_sequences_have_the_gradient_of_padded_ones() -> None:
    arrivals, model = DEMO.arrivals(0)[:12], build(positions=1024)

    def gradient(losses: list[torch.Tensor]) -> torch.Tensor:
        model.zero_grad(set_to_none=True)
        for loss in losses:
            loss.backward()
        return torch.cat([weight.grad.flatten() for weight in model.parameters() if weight.grad is not None])

    scorer, packed = CompletionScorer(model), PackedModel(model)
    padded = gradient([padded_loss(scorer, batch) for batch in at_random(arrivals, SETTINGS)])
    found = gradient([packed.loss(pack) for pack in varlen_packs(arrivals, SETTINGS)])
    assert padded.norm() > 1.0
    assert (found - padded).norm() < 1e-4 * padded.norm()


def test_packs_hold_every_sample_once_within_the_budget_and_waste_only_launches() -> None:
    arrivals = DEMO.arrivals(1)
    packs = varlen_packs(arrivals, SETTINGS)
    assert [item for pack in packs for item in pack] == arrivals
    assert all(sum(item.sample.length for item in pack) <= 600 or len(pack) == 1 for pack in packs)
    waste = try_out_packed(arrivals, SETTINGS)
    assert waste.padding == 0
    assert waste.micro_batches == len(packs)
    assert waste.excess > 0


@pytest.mark.parametrize("repetitions", [1])
def test_ways_are_compared_with_packing(repetitions: int) -> None:
    rows = list(computed(build(positions=1024), DEMO.arrivals(0)[:8], SETTINGS, repetitions))
    assert [row["way"] for row in rows] == ["at random", "streamed", "whole batch", "packed"]
    assert all(row["cpu_seconds"] > 0 for row in rows)
    assert rows[-1]["over_packed"] == 0
