"""Which groups are over, and which of their samples came: what tells a repeat, however late it comes. Pure.

Groups of ``<data set>/<index>/<pass>`` are one bit each, so no group has to be forgotten: a million of them are 125 kB.
Every record of a group is finished together, so the samples of a whole group need no bits of their own; of a group that
ended without some, those that came are kept by name.

Invariants, each with a test of its name:
- a_finished_sample_is_known_for_ever: whatever number of groups ends after it, also through JSON;
- a_copy_stays_as_it_is: what a checkpoint holds does not move on with the reader.
"""

import base64
import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any

CHUNK = 4096
"""Groups that share an integer: half a kilobyte to copy when one of them ends."""
_NUMBERED = re.compile(r"(.*)/(0|[1-9]\d{0,17})/(0|[1-9]\d{0,17})", re.DOTALL)
"""A data set, an index and a pass, the numbers as they are written by us: two names never mean one bit."""
_Place = tuple[str, int, int]
"""Data set, pass, and which ``CHUNK`` indices."""


@dataclass
class FinishedGroups:
    """``_whole``: bits of the groups of which every sample came; ``_partial``: of the others, the samples that did.

    All values are immutable, so a copy shares them.
    """

    _whole: dict[_Place, int] = field(default_factory=dict)
    _partial: dict[str, frozenset[int]] = field(default_factory=dict)

    def add(self, group_id: str, samples: Iterable[int], wanted: int) -> None:
        """A group is over, of which these samples came."""
        came, found = frozenset(samples), _place_of(group_id)
        if found is None or len(came) != wanted:
            self._partial[group_id] = came
        else:
            place, bit = found
            self._whole[place] = self._whole.get(place, 0) | 1 << bit

    def add_sample(self, group_id: str, index: int) -> None:
        """A sample came after its group was over."""
        if group_id in self._partial:
            self._partial[group_id] |= {index}

    def __contains__(self, group_id: str) -> bool:
        return group_id in self._partial or self._is_whole(group_id)

    def has_sample(self, group_id: str, index: int) -> bool:
        """Whether the group is over and this sample of it came."""
        came = self._partial.get(group_id)
        return self._is_whole(group_id) if came is None else index in came

    def _is_whole(self, group_id: str) -> bool:
        found = _place_of(group_id)
        return found is not None and bool(self._whole.get(found[0], 0) >> found[1] & 1)

    def copy(self) -> "FinishedGroups":
        """An independent copy: what a checkpoint keeps while this one goes on."""
        return FinishedGroups(dict(self._whole), dict(self._partial))

    def to_json(self) -> dict[str, Any]:
        """``{"whole": [["gsm8k", 0, {"0": "Bw=="}]], "partial": {"gsm8k/7/0": [0, 2]}}``, bits in base64."""
        chunks: dict[tuple[str, int], dict[str, str]] = {}
        for (dataset, data_pass, number), bits in self._whole.items():
            packed = bits.to_bytes((bits.bit_length() + 7) // 8, "little")
            chunks.setdefault((dataset, data_pass), {})[str(number)] = base64.b64encode(packed).decode()
        return {
            "whole": [[dataset, data_pass, found] for (dataset, data_pass), found in chunks.items()],
            "partial": {group_id: sorted(came) for group_id, came in self._partial.items()},
        }

    @classmethod
    def from_json(cls, data: Mapping[str, Any]) -> "FinishedGroups":
        """Read what ``to_json`` wrote."""
        whole = {
            (str(dataset), int(data_pass), int(number)): int.from_bytes(base64.b64decode(packed), "little")
            for dataset, data_pass, found in data["whole"]
            for number, packed in found.items()
        }
        return cls(whole, {str(group_id): frozenset(map(int, came)) for group_id, came in data["partial"].items()})


def _place_of(group_id: str) -> tuple[_Place, int] | None:
    """Where a group's bit is; none for a name of another form."""
    if (match := _NUMBERED.fullmatch(group_id)) is None:
        return None
    number, bit = divmod(int(match[2]), CHUNK)
    return (match[1], int(match[3]), number), bit
