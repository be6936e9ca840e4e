import pytest

from benchmarks.gpu.memory import (
    GIB,
    SHAPES,
    cache_tokens,
    largest_micro_batch,
    smallest_tensor_parallel_size,
    trainer_bytes,
)

BY_NAME = {shape.name: shape for shape in SHAPES}
SMALL, LARGE = BY_NAME["Qwen2.5-1.5B"], BY_NAME["Qwen3-32B"]


def test_bytes_are_those_of_the_formulas() -> None:
    # 18 a parameter; 2 x 28 + 34 bytes a token and unit of width; 2^26 logits of 12 bytes.
    assert trainer_bytes(SMALL, 1000) == pytest.approx(18 * 1.54e9 + (56 + 34) * 1000 * 1536 + (1 << 26) * 12)
    # q and o: 2 (1536 + 1536); k and v: 2 (1536 + 256); gate, up and down: 3 (1536 + 8960).
    adapter = 16 * 28 * (6144 + 3584 + 31488)
    whole = trainer_bytes(SMALL, 1000) - 18 * 1.54e9
    assert trainer_bytes(SMALL, 1000, lora_rank=16) == pytest.approx(6 * 1.54e9 + 16 * adapter + whole)
    assert trainer_bytes(SMALL, 1000, optimizer_offload=True) == pytest.approx(10 * 1.54e9 + whole)
    assert cache_tokens(SMALL, 80e9, 1) == int((0.9 * 80e9 - 2 * 1.54e9 - 2 * GIB) / (4 * 28 * 256))


def test_a_model_too_large_for_the_memory_has_size_0_and_its_adapter_may_fit() -> None:
    assert largest_micro_batch(SMALL, 80e9) == 16_384
    assert largest_micro_batch(LARGE, 141e9) == 0
    assert largest_micro_batch(BY_NAME["Qwen3-8B"], 80e9) == 0
    assert largest_micro_batch(BY_NAME["Qwen3-8B"], 80e9, lora_rank=16) > 0
    assert largest_micro_batch(BY_NAME["Qwen3-4B"], 80e9, optimizer_offload=True) == 16_384
    assert cache_tokens(LARGE, 24e9, 1) == 0
    assert smallest_tensor_parallel_size(LARGE, 24e9) in (0, 8)
    sizes = [smallest_tensor_parallel_size(shape, 80e9) for shape in SHAPES]
    assert sizes == sorted(sizes)
