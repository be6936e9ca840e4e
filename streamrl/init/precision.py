"""Measures which precision this processor computes in faster.

Processors without instructions for bfloat16 compute its matrix products many times slower than those of float32.
"""

import time

ROWS, INNER, COLUMNS = 256, 576, 1536
"""A layer of a small model: SmolLM2-135M's first feed-forward product."""
REPETITIONS = 5
MUCH_SLOWER = 2.0
"""Times as long as float32 from which bfloat16 is not worth the memory that it saves."""


def faster_dtype() -> str:
    """``bfloat16`` if this processor computes it at least as fast as float32, else ``float32``. Takes about 0.1 s."""
    seconds = {dtype: product_seconds(dtype) for dtype in ("float32", "bfloat16")}
    return min(seconds, key=lambda dtype: seconds[dtype])


def slow_bfloat16() -> str | None:
    """Both measured times in words, if this processor is much slower in bfloat16 than in float32; else None."""
    single, half = product_seconds("float32"), product_seconds("bfloat16")
    if half < MUCH_SLOWER * single:
        return None
    return (
        f"this processor takes {1000 * half:.3g} ms for a matrix product in bfloat16, {1000 * single:.3g} ms in "
        f"float32 ({half / single:.0f} times as long)"
    )


def product_seconds(dtype: str) -> float:
    """Seconds of the fastest of ``REPETITIONS`` matrix products."""
    import torch

    left, right = (
        torch.zeros(shape, dtype=getattr(torch, dtype), device="cpu") for shape in ((ROWS, INNER), (INNER, COLUMNS))
    )
    times = []
    for _ in range(REPETITIONS + 1):  # the first call also prepares kernels
        began = time.perf_counter()
        torch.mm(left, right)
        times.append(time.perf_counter() - began)
    return min(times[1:])
