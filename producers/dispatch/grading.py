"""Samples that were sampled and are not graded yet: no worker owes them, and their groups are not whole. Pure.

The two topics are not read in the order in which they were written, so a sample may be seen graded before it is seen
ungraded; its flight, which misses it no more by then, tells.
"""


class SamplesInGrading:
    """By group, the indices of the samples that graders have."""

    def __init__(self) -> None:
        self._samples: dict[str, set[int]] = {}

    def __len__(self) -> int:
        return sum(map(len, self._samples.values()))

    def begin(self, group_id: str, sample_index: int) -> None:
        """A sample is on its way to the graders."""
        self._samples.setdefault(group_id, set()).add(sample_index)

    def end(self, group_id: str, sample_index: int) -> bool:
        """A sample is graded; whether it was known to be on its way."""
        found = self._samples.get(group_id, set())
        if sample_index not in found:
            return False
        found.remove(sample_index)
        if not found:
            del self._samples[group_id]
        return True

    def has(self, group_id: str) -> bool:
        """Whether a sample of the group is on its way."""
        return group_id in self._samples

    def forget(self, group_id: str) -> None:
        """The group was trained or skipped."""
        self._samples.pop(group_id, None)
