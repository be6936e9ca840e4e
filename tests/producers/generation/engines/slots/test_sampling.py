"""Drawing tokens: from the truncated distribution, with log-probs of the whole one, reproducible by row."""

from itertools import combinations
from statistics import correlation

import numpy as np
import pytest
import torch

from streamrl.producers.generation.engines.slots import RowSampler, uniforms
from streamrl.schemas.trajectories import SamplingParams

CPU = torch.device("cpu")


def params(**values: float) -> SamplingParams:
    return SamplingParams(max_completion_length=1, **values)


def draw(logits: torch.Tensor, row: SamplingParams, rows: int, seed: int = 0) -> tuple[torch.Tensor, torch.Tensor]:
    sampler = RowSampler.of([row] * rows, range(seed, seed + rows), [0] * rows, CPU)
    return sampler.sample(logits.expand(rows, -1))


def expected(logits: torch.Tensor, row: SamplingParams) -> torch.Tensor:
    """Probabilities by definition: temperature, min-p, top-k, renormalise, smallest set reaching top-p, renormalise."""
    probabilities = (logits.double() / row.temperature).softmax(-1)
    probabilities = torch.where(probabilities < row.min_p * probabilities.max(), 0.0, probabilities)
    order = probabilities.argsort(descending=True)
    kept = torch.zeros_like(probabilities)
    kept[order[: row.top_k or None]] = probabilities[order[: row.top_k or None]]
    kept /= kept.sum()
    mass = 0.0
    for token in order:
        if mass >= row.top_p:
            kept[token] = 0.0
        mass += kept[token].item()
    return kept / kept.sum()


@pytest.mark.parametrize(
    "row",
    [
        params(),
        params(temperature=0.5),
        params(temperature=2.0, top_k=4),
        params(top_p=0.7),
        params(temperature=1.3, top_k=6, top_p=0.8),
        params(min_p=0.1),
        params(min_p=1.0),
        params(temperature=0.7, min_p=0.05, top_k=5, top_p=0.9),
    ],
)
def test_tokens_are_of_the_truncated_distribution_and_their_logprobs_of_the_whole_one(row: SamplingParams) -> None:
    logits = torch.randn(12, generator=torch.Generator().manual_seed(3)) * 1.5
    tokens, logprobs = draw(logits, row, 40_000)
    wanted = expected(logits, row)
    counted = torch.bincount(tokens, minlength=12).double() / len(tokens)
    assert (counted - wanted).abs().max() < 0.01
    assert torch.equal(counted > 0, wanted > 0)
    whole = (logits.double() / row.temperature).log_softmax(-1)
    assert torch.allclose(logprobs.double(), whole[tokens], atol=1e-5)


def test_rows_of_a_batch_keep_their_own_parameters() -> None:
    rows = [params(), params(temperature=0.0), params(top_k=1), params(temperature=0.3, top_p=0.5), params(min_p=0.9)]
    logits = torch.randn(5, 50, generator=torch.Generator().manual_seed(1))
    together = RowSampler.of(rows, [5, 6, 7, 8, 9], [0] * 5, CPU).sample(logits)
    for index, row in enumerate(rows):
        alone = RowSampler.of([row], [5 + index], [0], CPU).sample(logits[index : index + 1])
        assert together[0][index] == alone[0][0]
        assert together[1][index] == pytest.approx(alone[1][0].item(), abs=1e-6)


def test_temperature_zero_takes_the_best_and_reports_it_at_temperature_one() -> None:
    logits = torch.tensor([0.0, 3.0, 1.0])
    tokens, logprobs = draw(logits, params(temperature=0.0), 5)
    assert tokens.tolist() == [1] * 5
    assert logprobs[0].item() == pytest.approx(logits.log_softmax(-1)[1].item())


def test_top_k_one_is_certain() -> None:
    logits = torch.tensor([0.0, 3.0, 1.0])
    tokens, logprobs = draw(logits, params(top_k=1), 5)
    assert tokens.tolist() == [1] * 5
    assert logprobs[0].item() == pytest.approx(logits.log_softmax(-1)[1].item())


def test_a_seed_gives_the_same_stream_whatever_was_drawn_by_others() -> None:
    logits = torch.zeros(1, 1000)
    first = RowSampler.of([params()], [42], [0], CPU)
    stream = [first.sample(logits)[0].item() for _ in range(4)]
    resumed = RowSampler.of([params(), params()], [7, 42], [0, 2], CPU)
    assert resumed.sample(logits.expand(2, -1))[0][1].item() == stream[2]
    assert len(set(stream)) > 1


def test_neighbouring_seeds_and_negative_ones_are_independent() -> None:
    seeds = np.array([seed & 0xFFFFFFFFFFFFFFFF for seed in range(-2000, 2000)], dtype=np.uint64)
    streams = np.stack([uniforms(seeds, np.full(4000, n, dtype=np.uint64)) for n in range(3)])
    assert abs(streams.mean() - 0.5) < 0.01
    assert max(abs(correlation(one, other)) for one, other in combinations(streams.tolist(), 2)) < 0.06
    assert abs(correlation(streams[0][1:].tolist(), streams[0][:-1].tolist())) < 0.06
    assert streams.min() >= 0
    assert streams.max() < 1


@pytest.mark.parametrize("vocabulary", [20, 3001])
def test_impossible_tokens_are_never_drawn(vocabulary: int) -> None:
    logits = torch.full((vocabulary,), -torch.inf)
    logits[[3, vocabulary - 1]] = 0.0
    tokens, _ = draw(logits, params(), 5000)
    assert set(tokens.tolist()) == {3, vocabulary - 1}


@pytest.mark.parametrize("row", [params(), params(temperature=0.7, top_p=0.9)])
def test_a_draw_from_a_large_vocabulary_is_the_first_token_whose_cumulative_probability_exceeds_its_number(
    row: SamplingParams,
) -> None:
    rows = 20
    logits = torch.randn(rows, 5001, generator=torch.Generator().manual_seed(8)) * 3
    tokens, logprobs = RowSampler.of([row] * rows, range(rows), [0] * rows, CPU).sample(logits)
    points = uniforms(np.arange(rows, dtype=np.uint64), np.zeros(rows, dtype=np.uint64))
    for index in range(rows):
        wanted, token = expected(logits[index], row), tokens[index]
        after = wanted[: token + 1].sum()
        assert after - wanted[token] - 1e-6 <= points[index] <= after + 1e-6
    whole = (logits.double() / row.temperature).log_softmax(-1).gather(1, tokens[:, None])[:, 0]
    assert torch.allclose(logprobs.double(), whole, atol=2e-6)
