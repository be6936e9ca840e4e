"""Buckets of output lengths, with boundaries from the settings or fitted to observed lengths.

Fitted boundaries give every bucket the same number of observed tokens. With equal numbers of completions the last
bucket would hold most of the tokens and nearly the whole range of lengths. Then its partitions would lag, and its
micro-batches would be mostly padding. With equal tokens all partitions have the same load, and the bucket of the
longest completions is the narrowest in proportion.

Invariants:
- the_number_of_buckets_never_changes: it follows from the number of partitions, which is fixed for a run;
- a_version_names_one_set_of_boundaries: a higher version is newer, also across restarts, because it is at least the
  time of the fit in seconds; version 0 means the boundaries of the settings.
"""

import json
import math
import time
from bisect import bisect_left, bisect_right, insort
from collections import deque
from collections.abc import Callable, Sequence
from itertools import accumulate
from pathlib import Path

import structlog
from pydantic import BaseModel, ConfigDict, Field, ValidationError

from streamrl.schemas.files import write_atomically


class RecentLengths:
    """The newest ``window`` lengths, in order of arrival and in order of size."""

    def __init__(self, window: int) -> None:
        self._window = window
        # The same lengths twice: one to know the oldest, the other to look up quantiles.
        self._arrived: deque[int] = deque()
        self._sorted: list[int] = []

    def __len__(self) -> int:
        return len(self._sorted)

    def observe(self, length: int) -> None:
        """Add a length; if the window is full, the oldest is removed."""
        if len(self._arrived) == self._window:
            # Equal lengths are interchangeable in the sorted list.
            del self._sorted[bisect_left(self._sorted, self._arrived.popleft())]
        self._arrived.append(length)
        insort(self._sorted, length)

    def quantile(self, share: float) -> int:
        """The smallest length that at least this share of the lengths does not exceed (nearest rank)."""
        # Nearest rank: of n lengths, the one at place ceil(share × n), counted from 1.
        return self._sorted[max(0, math.ceil(share * len(self._sorted)) - 1)]

    def rank(self, length: int) -> float:
        """Share of the lengths that are shorter, equal ones counted half; 0 to 1, and 0.5 before the first."""
        if not self._sorted:
            return 0.5
        return (bisect_left(self._sorted, length) + bisect_right(self._sorted, length)) / 2 / len(self._sorted)

    def in_order(self) -> list[int]:
        """A copy of the lengths, the shortest first."""
        return list(self._sorted)


log = structlog.get_logger()

FILE = "buckets.json"
MIN_CHANGE = 0.1
"""New boundaries are used only if one moves by more than this share: each change mixes lengths within partitions."""


class Boundaries(BaseModel):
    """Ascending lengths in tokens. A length equal to a boundary belongs to the bucket above it."""

    model_config = ConfigDict(frozen=True, extra="ignore")

    version: int = Field(ge=0)
    lengths: tuple[int, ...]

    def of(self, length: int) -> int:
        """The bucket of a length."""
        return bisect_right(self.lengths, length)


class Buckets:
    """The buckets that all predictors of a process share.

    ``fit_every``: lengths between two fits, the first after ``fit_after``; None keeps the boundaries of the settings.
    """

    def __init__(
        self,
        boundaries: Sequence[int],
        *,
        fit_every: int | None = None,
        fit_after: int = 256,
        window: int = 4096,
        folder: Path | None = None,
        clock: Callable[[], float] = time.time,
    ) -> None:
        self.boundaries = Boundaries(version=0, lengths=tuple(boundaries))
        self._fit_every = fit_every
        self._recent = RecentLengths(window)
        self._until_fit = fit_after
        # Fixed boundaries come from the settings, so those that an earlier run fitted are not read.
        self._folder = folder if fit_every is not None else None
        self._clock = clock
        self._load()

    @property
    def are_fitted(self) -> bool:
        """Whether the boundaries follow the observed lengths."""
        return self._fit_every is not None

    @property
    def version(self) -> int:
        """Version of the boundaries in use."""
        return self.boundaries.version

    def of(self, length: int) -> int:
        """The bucket of a length in tokens."""
        return self.boundaries.of(length)

    def observe(self, length: int) -> None:
        """Note the length of a completion in tokens; every ``fit_every`` lengths the boundaries are fitted again."""
        if self._fit_every is None:
            return
        self._recent.observe(length)
        self._until_fit -= 1
        if self._until_fit <= 0:
            self._until_fit = self._fit_every
            self._fit()

    def _fit(self) -> None:
        fitted = equal_tokens(self._recent.in_order(), len(self.boundaries.lengths))
        before = self.boundaries.lengths
        if all(abs(new - old) <= MIN_CHANGE * old for new, old in zip(fitted, before, strict=True)):
            return
        # Higher than all versions of this process, and than those of earlier ones unless the clock went back.
        version = max(self.version + 1, int(self._clock()))
        self.boundaries = Boundaries(version=version, lengths=fitted)
        log.info("bucket boundaries fitted", version=version, boundaries=fitted, before=before)
        self._save()

    def _save(self) -> None:
        if self._folder is None:
            return
        try:
            self._folder.mkdir(parents=True, exist_ok=True)
            write_atomically(self._folder / FILE, self.boundaries.model_dump_json())
        except OSError as error:
            log.warning("bucket boundaries not saved", error=str(error))

    def _load(self) -> None:
        """Load saved boundaries. Boundaries that cannot be read, or have another number, are ignored."""
        if self._folder is None:
            return
        try:
            saved = Boundaries.model_validate(json.loads((self._folder / FILE).read_text()))
        except FileNotFoundError:
            return
        except (OSError, ValueError, ValidationError) as error:
            log.warning("saved bucket boundaries ignored", error=str(error))
            return
        if len(saved.lengths) == len(self.boundaries.lengths) and list(saved.lengths) == sorted(set(saved.lengths)):
            self.boundaries = saved


def equal_tokens(in_order: Sequence[int], count: int) -> tuple[int, ...]:
    """``count`` strictly ascending boundaries that split ascending lengths into buckets with equally many tokens."""
    sums = list(accumulate(in_order))
    total = sums[-1] if sums else 0
    boundaries: list[int] = []
    for number in range(1, count + 1):
        # Boundary k of n is where the tokens of shorter completions first exceed k / (n + 1) of all tokens.
        place = bisect_right(sums, total * number / (count + 1))
        length = in_order[min(place, len(in_order) - 1)] if in_order else number
        # Keep them strictly ascending, even if many lengths are equal.
        boundaries.append(max(length, boundaries[-1] + 1 if boundaries else 1))
    return tuple(boundaries)
