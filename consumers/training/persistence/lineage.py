"""Numbers the incarnations of a run's trainer. The newest number owns the run; an older holder must stop.

Invariant a_lineage_is_given_once: a number is claimed by creating a file that must not exist.
"""

import json
from dataclasses import dataclass
from pathlib import Path

from schemas.errors import Superseded

FOLDER = "lineages"


@dataclass(frozen=True)
class Lineage:
    """A claimed number (from 1) and the directory in which it was claimed."""

    number: int
    folder: Path

    def check(self) -> None:
        """Make sure that nobody has taken over.

        Raises:
            Superseded: a newer lineage exists.
        """
        newest = _newest(self.folder)
        if newest > self.number:
            raise Superseded(
                f"expected lineage {self.number} to be the newest in {self.folder}, found {newest}: "
                "another trainer has taken over this run; let it go on"
            )


def claim_lineage(checkpoints: Path, *, at_least: int, now: float) -> Lineage:
    """Claim the number after the largest one claimed, and after ``at_least - 1``."""
    folder = checkpoints / FOLDER
    folder.mkdir(parents=True, exist_ok=True)
    number = max(_newest(folder) + 1, at_least)
    while True:
        try:
            with (folder / f"{number}.json").open("x") as file:
                json.dump({"lineage": number, "started_at": now}, file)
        except FileExistsError:
            number += 1
        else:
            return Lineage(number, folder)


def _newest(folder: Path) -> int:
    return max((int(path.stem) for path in folder.glob("*.json") if path.stem.isdigit()), default=0)
