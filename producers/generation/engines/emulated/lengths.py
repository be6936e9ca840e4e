"""The length trace: how many tokens a completion has, known in advance to whoever asks. Pure, but for one file read.

A hash of seed, prompt id, group id and sample index gives a normal score; the distribution's quantile at that score is
the length. So every attempt at a sample has the same length, on every worker, and a predictor can know it perfectly.
"""

import json
import math
from functools import lru_cache
from itertools import accumulate
from pathlib import Path
from statistics import NormalDist
from typing import Any

import numpy as np
import xxhash
from numpy.typing import NDArray

from producers.generation.engines.emulated.settings import LengthTraceSettings
from schemas.errors import DataError
from schemas.messages.prompts import Prompt

_NORMAL = NormalDist()
_P99 = _NORMAL.inv_cdf(0.99)
_BITS = 52


def trace_length(settings: LengthTraceSettings, group_id: str, sample_index: int, prompt: Prompt | None) -> int:
    """Tokens of a sample's completion, at least one, the end-of-sequence token included.

    ``prompt`` is needed for ``source = "column"``; otherwise its id gives the share that samples have in common.

    Raises:
        DataError: the prompt lacks the column, or the file of lengths cannot be read.
    """
    if settings.source == "column":
        return _bounded(settings, _column(settings, sample_index, prompt))
    shared = _score(settings.seed, prompt.prompt_id if prompt else group_id) if settings.prompt_share else 0.0
    own = _score(settings.seed, f"{group_id}/{sample_index}")
    score = math.sqrt(settings.prompt_share) * shared + math.sqrt(1 - settings.prompt_share) * own
    return _bounded(settings, _at_score(settings, score))


def _bounded(settings: LengthTraceSettings, length: float) -> int:
    whole = max(1, round(length * settings.factor))
    return whole if settings.max_tokens is None else min(whole, settings.max_tokens)


def _score(seed: int, name: str) -> float:
    bits = xxhash.xxh3_64_intdigest(name.encode(), seed=seed) >> (64 - _BITS)
    return _NORMAL.inv_cdf((bits + 0.5) / (1 << _BITS))


def _at_score(settings: LengthTraceSettings, score: float) -> float:
    if settings.source == "lognormal":
        return settings.median_tokens * math.pow(settings.p99_over_median, score / _P99)
    share = _NORMAL.cdf(score)
    if settings.source == "file":
        assert settings.path is not None, "checked by the settings"
        lengths = _read_lengths(settings.path)
        return float(lengths[min(int(share * len(lengths)), len(lengths) - 1)])
    shares, ends = _cumulated(settings.histogram, settings.histogram_end_tokens)
    return float(np.interp(share, shares, ends))


@lru_cache(maxsize=8)
def _cumulated(bins: tuple[tuple[float, float], ...], end: float) -> tuple[NDArray[np.float64], NDArray[np.float64]]:
    shares = np.array([0.0, *accumulate(share for _, share in bins)])
    return shares / shares[-1], np.array([*(start for start, _ in bins), end])


@lru_cache(maxsize=8)
def _read_lengths(path: Path) -> NDArray[np.int64]:
    try:
        if path.suffix == ".npy":
            found = np.load(path, allow_pickle=False)
        else:
            found = np.array([_number(json.loads(line)) for line in path.read_text().splitlines() if line.strip()])
        lengths = np.sort(found.astype(np.int64).reshape(-1))
    except (OSError, ValueError, TypeError, KeyError) as error:
        raise DataError(f"expected lengths in tokens in {path} (emulation.lengths.path), got: {error}") from error
    if not len(lengths) or lengths[0] < 1:
        raise DataError(f"expected one length or more, each at least 1, in {path} (emulation.lengths.path)")
    return lengths


def _number(row: Any) -> float:
    return float(row["length"] if isinstance(row, dict) else row)


def _column(settings: LengthTraceSettings, sample_index: int, prompt: Prompt | None) -> float:
    value = prompt.columns.get(settings.column) if prompt else None
    if isinstance(value, list) and value:
        value = value[sample_index % len(value)]
    if not isinstance(value, int | float) or isinstance(value, bool) or not 0 < value < math.inf:
        raise DataError(
            f"expected a length above 0, or a list of them, in column {settings.column!r} of prompt "
            f"{prompt.prompt_id if prompt else 'none'} (emulation.lengths.column), got {value!r:.100}"
        )
    return float(value)
