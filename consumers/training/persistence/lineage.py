"""Numbers the incarnations of a run's trainer. The newest number owns the run; an older holder must stop.

Invariant a_lineage_is_given_once: a number is claimed by creating something that must not exist.
"""

import json
from dataclasses import dataclass

from consumers.training.persistence.locations import CheckpointLocation
from schemas.errors import CheckpointError, Superseded


@dataclass(frozen=True)
class Lineage:
    """A claimed number (from 1) and where it was claimed."""

    number: int
    location: CheckpointLocation

    def check(self) -> None:
        """Make sure that nobody has taken over.

        Raises:
            Superseded: a newer lineage exists.
            CheckpointError: the claims cannot be read.
        """
        try:
            newest = max(self.location.claims(), default=0)
        except OSError as error:
            raise CheckpointError(
                f"expected to read the lineage claims in {self.location}, got: {error}; "
                "without them this trainer cannot know whether another has taken over"
            ) from error
        if newest > self.number:
            raise Superseded(
                f"expected lineage {self.number} to be the newest in {self.location}, found {newest}: "
                "superseded, another trainer has taken over this run; let it go on"
            )


def claim_lineage(location: CheckpointLocation, *, at_least: int, now: float) -> Lineage:
    """Claim the number after the largest one claimed, and after ``at_least - 1``; ``now``: seconds since the epoch.

    Raises:
        CheckpointError: the location cannot be written to.
    """
    try:
        number = max([at_least, *(claimed + 1 for claimed in location.claims())])
        while not location.claim(number, json.dumps({"lineage": number, "started_at": now}).encode()):
            number += 1
    except OSError as error:
        raise CheckpointError(f"expected to claim a lineage in {location}, got: {error}") from error
    return Lineage(number, location)
