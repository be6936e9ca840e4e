"""What a planted bug is."""

from collections.abc import Sequence
from dataclasses import dataclass


@dataclass(frozen=True)
class Mutant:
    """``old`` occurs once in ``file`` and becomes ``new``; then each of ``tests``, pytest's node ids, must fail."""

    id: str
    description: str
    file: str
    old: str
    new: str
    tests: Sequence[str]
