"""The length trace: the number of tokens of each emulated completion, known in advance. Pure, but for one file read.

A hash of seed, prompt id, group id and sample index gives a normal score, and the distribution's quantile at that score
is the length. So all attempts at a sample have the same length on every worker, and a predictor can know it exactly.
"""

import json
import math
from functools import lru_cache
from itertools import accumulate
from pathlib import Path
from statistics import NormalDist
from typing import Annotated, Any, Literal, Self

import numpy as np
import xxhash
from numpy.typing import NDArray
from pydantic import Field, model_validator

from streamrl.schemas.errors import DataError
from streamrl.schemas.settings import SettingsTable
from streamrl.schemas.trajectories import Prompt

Bin = tuple[Annotated[float, Field(ge=0)], Annotated[float, Field(ge=0)]]

STREAMRL_BINS: tuple[Bin, ...] = (
    (839, 0.1251), (1474, 0.1690), (2109, 0.1208), (2741, 0.1163), (3376, 0.0772), (4011, 0.0616),
    (4646, 0.0528), (5281, 0.0303), (5916, 0.0331), (6549, 0.0215), (7184, 0.0156), (7819, 0.0225),
    (8454, 0.0156), (9089, 0.0049), (9724, 0.0068), (10357, 0.0039), (10991, 0.0068), (11626, 0.0029),
    (12261, 0.0127), (12896, 0.0078), (13531, 0.0078), (14164, 0.0195), (14799, 0.0059), (15434, 0.0068),
    (16069, 0.0078), (16704, 0.0107), (17339, 0.0088), (17972, 0.0107), (18607, 0.0059), (19241, 0.0088),
)  # fmt: skip
"""Output lengths in StreamRL's evaluation (its figure 7, read off the picture): start and share of each bin."""


class LengthTraceSettings(SettingsTable):
    """``[emulation.lengths]``: the length of each completion, which depends on these settings and its id only."""

    source: Annotated[
        Literal["lognormal", "histogram", "file", "column"],
        Field(description="Source of lengths: a distribution, recorded lengths of a file, or a column of each prompt."),
    ] = "lognormal"
    seed: Annotated[int, Field(ge=0, description="Seed of the draw.")] = 0
    median_tokens: Annotated[
        float, Field(gt=0, description="lognormal: median; half of the completions are shorter.")
    ] = 1000.0
    p99_over_median: Annotated[
        float, Field(ge=1, description="lognormal: the 99th percentile as a multiple of the median.")
    ] = 10.0
    histogram: Annotated[
        tuple[Bin, ...],
        Field(min_length=1, description="histogram: (first length of a bin, share); default: the StreamRL paper's."),
    ] = STREAMRL_BINS
    histogram_end_tokens: Annotated[float, Field(gt=0, description="histogram: end of its last bin.")] = 19876.0
    path: Annotated[
        Path | None,
        Field(description="file: .npy with integers, or .jsonl with a number or an object with 'length' on each line."),
    ] = None
    column: Annotated[
        str,
        Field(description="column: the prompt's column with the length in tokens, or with a list of one per sample."),
    ] = "length"
    factor: Annotated[float, Field(gt=0, description="Factor by which every length is multiplied.")] = 1.0
    max_tokens: Annotated[int | None, Field(ge=1, description="Longest length; unset: no limit.")] = None
    prompt_share: Annotated[
        float,
        Field(
            ge=0,
            le=1,
            description="Share of the normal score's variance that the samples of a prompt have in common.",
        ),
    ] = 0.0
    prediction_noise: Annotated[
        float,
        Field(
            ge=0,
            description="With lengths.predictor = trace: sigma of the log-normal noise by which predicted lengths are "
            "multiplied.",
        ),
    ] = 0.0
    prompt_characters_per_token: Annotated[
        float, Field(gt=0, description="Characters of a prompt that count as one token.")
    ] = 4.0

    @model_validator(mode="after")
    def _agree(self) -> Self:
        if self.source == "file" and (self.path is None or self.path.suffix not in (".npy", ".jsonl")):
            raise ValueError(f"expected emulation.lengths.path, a .npy or .jsonl file, got {self.path}")
        starts = [start for start, _ in self.histogram]
        if [*starts, self.histogram_end_tokens] != sorted({*starts, self.histogram_end_tokens}):
            raise ValueError("expected emulation.lengths.histogram with ascending starts below histogram_end_tokens")
        if not sum(share for _, share in self.histogram):
            raise ValueError("expected a share above 0 in emulation.lengths.histogram, got none")
        return self


_NORMAL = NormalDist()
_P99 = _NORMAL.inv_cdf(0.99)
_BITS = 52
"""Bits of the hash that are used: as many as a float64 between 0 and 1 holds exactly, with half a step to spare."""


def trace_length(settings: LengthTraceSettings, group_id: str, sample_index: int, prompt: Prompt | None) -> int:
    """Tokens of a sample's completion, at least one, including the end-of-sequence token.

    ``prompt`` is needed for ``source = "column"``. Otherwise its id gives the part that samples have in common.

    Raises:
        DataError: the prompt lacks the column, or the file of lengths cannot be read.
    """
    if settings.source == "column":
        return _bounded(settings, _column(settings, sample_index, prompt))
    # Uses the prompt's id, since a group's id changes with each pass over the data.
    shared = _score(settings.seed, prompt.prompt_id if prompt else group_id) if settings.prompt_share else 0.0
    own = _score(settings.seed, f"{group_id}/{sample_index}")
    # Both are standard normal, so their mix is, too. Two samples of a prompt have the correlation ``prompt_share``.
    score = math.sqrt(settings.prompt_share) * shared + math.sqrt(1 - settings.prompt_share) * own
    return _bounded(settings, _at_score(settings, score))


def _bounded(settings: LengthTraceSettings, length: float) -> int:
    whole = max(1, round(length * settings.factor))
    return whole if settings.max_tokens is None else min(whole, settings.max_tokens)


def _score(seed: int, name: str) -> float:
    bits = xxhash.xxh3_64_intdigest(name.encode(), seed=seed) >> (64 - _BITS)
    # Half a step away from 0 and 1, where the inverse is infinite.
    return _NORMAL.inv_cdf((bits + 0.5) / (1 << _BITS))


def _at_score(settings: LengthTraceSettings, score: float) -> float:
    if settings.source == "lognormal":  # median * (p99 / median) ^ (score / score of the 99th percentile)
        return settings.median_tokens * math.pow(settings.p99_over_median, score / _P99)
    share = _NORMAL.cdf(score)
    if settings.source == "file":
        assert settings.path is not None, "checked by the settings"
        # Sorted, so that the share selects a quantile of the recorded lengths.
        lengths = _read_lengths(settings.path)
        # The cdf of a high score may round to 1, which would be one index too high.
        return float(lengths[min(int(share * len(lengths)), len(lengths) - 1)])
    # The distribution function is linear within a bin.
    shares, ends = cumulated(settings.histogram, settings.histogram_end_tokens)
    return float(np.interp(share, shares, ends))


@lru_cache(maxsize=8)
def cumulated(bins: tuple[tuple[float, float], ...], end: float) -> tuple[NDArray[np.float64], NDArray[np.float64]]:
    """The distribution function: shares of lengths below each bin's start and the last bin's end, and these lengths.

    Both arrays are [bins + 1]. The bins' own shares need not sum to 1.
    """
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
