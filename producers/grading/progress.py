"""How far the grading of one partition is: records are begun in order and end in any. Pure.

Invariant nothing_unfinished_is_committed: ``low`` is never above a record that was begun and has not ended.
"""

from dataclasses import dataclass, field


@dataclass
class PartitionProgress:
    """``position``: the next offset to be read. ``committed``: what the group was told last."""

    position: int | None = None
    committed: int | None = None
    # In the order in which they were read, which is that of their offsets.
    _unfinished: dict[int, None] = field(default_factory=dict)

    @property
    def unfinished(self) -> int:
        """Records that were begun and have not ended."""
        return len(self._unfinished)

    @property
    def low(self) -> int | None:
        """Every record below this offset has ended; None: nothing was read yet."""
        return next(iter(self._unfinished), self.position)

    def begin(self, offset: int) -> None:
        """The next record was read."""
        if self.committed is None:
            self.committed = offset  # where the group begins anyway
        self._unfinished[offset] = None
        self.position = offset + 1

    def end(self, offset: int) -> None:
        """What was made of a record is on its topic."""
        self._unfinished.pop(offset, None)
