"""Output lengths of a run that was recorded, to expect again."""

from collections.abc import Sequence
from pathlib import Path

from deploy.inspection.lengths.recorded import recorded_completions
from schemas.errors import DataError


def recorded_lengths(place: Path | None) -> Sequence[int]:
    """Tokens of each completion of a run or export; none if no place is named.

    Raises:
        UserError: it is neither, or nothing has the run's topics.
        DataError: it holds no completion.
    """
    if place is None:
        return ()
    lengths = [completion.length for completion in recorded_completions([place], print) if completion.length]
    if not lengths:
        raise DataError(f"expected finished completions in {place}, got none")
    return lengths
