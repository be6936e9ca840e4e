"""Rows of different lengths in one key-value cache."""

import torch

from streamrl.producers.generation.engines.own_forward import SlotCache


def states(rows: int, value: float) -> tuple[torch.Tensor, torch.Tensor]:
    return torch.full((rows, 2, 1, 4), value), torch.full((rows, 2, 1, 3), -value)


def test_each_row_is_written_at_its_own_position() -> None:
    cache = SlotCache(1)
    cache.reserve(2, 8, 0, 0)
    cache.positions.set(torch.tensor([0, 5]), 6)
    keys, values = cache.update(*states(2, 1.0), 0)
    assert keys.shape == (2, 2, 6, 4)
    assert values.shape == (2, 2, 6, 3)
    assert keys[:, 0, :, 0].nonzero().tolist() == [[0, 0], [1, 5]]
    assert values[:, 1, :, 2].nonzero().tolist() == [[0, 0], [1, 5]]


def test_growing_and_shrinking_keep_what_was_written() -> None:
    cache = SlotCache(2)
    cache.reserve(1, 4, 0, 0)
    for position in range(300):
        cache.reserve(1, position + 1, 1, position)
        cache.positions.set(torch.tensor([position]), position + 1)
        for layer in range(2):
            keys, _ = cache.update(*states(1, position + layer + 1.0), layer)
        assert keys[0, 0, :, 0].tolist() == [float(p + 2) for p in range(position + 1)]
    assert cache.positions.room[1] < 2 * 300
    cache.reserve(1, 5, 1, 4)
    assert cache.positions.room[1] <= 64
    assert cache.layers[0].keys[0, 0, :5, 0].tolist() == [1.0, 2.0, 3.0, 4.0, 0.0]


def test_a_row_takes_the_place_of_another() -> None:
    cache = SlotCache(1)
    cache.reserve(3, 4, 0, 0)
    cache.positions.set(torch.tensor([0, 0, 0]), 1)
    cache.update(torch.arange(3.0).view(3, 1, 1, 1), torch.arange(3.0).view(3, 1, 1, 1), 0)
    cache.move(2, 0, 1)
    assert cache.layers[0].keys[:, 0, 0, 0].tolist() == [2.0, 1.0, 2.0]


def test_released_memory_is_gone() -> None:
    cache = SlotCache(1)
    cache.reserve(3, 4, 0, 0)
    cache.positions.set(torch.tensor([0]), 1)
    cache.update(*states(1, 1.0), 0)
    cache.release()
    assert cache.layers[0].keys.numel() == 0
    assert cache.positions.room == (0, 0)
