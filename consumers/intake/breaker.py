"""Stops the trainer when so much input is bad that the fault must be ours. Pure."""

from collections import deque
from dataclasses import dataclass, field

from schemas.errors import StreamRLError

WINDOW = 1000
MIN_SEEN = 200


@dataclass
class CircuitBreaker:
    """Counts unusable records in a row and among the last 1,000."""

    max_consecutive: int
    max_share: float
    consecutive: int = 0
    recent: deque[bool] = field(default_factory=lambda: deque(maxlen=WINDOW))
    bad: int = 0

    def observe(self, *, usable: bool, where: str) -> None:
        """Note one record.

        Raises:
            StreamRLError: too many are bad; the last reasons are on the dead-letters and skips topics.
        """
        if len(self.recent) == WINDOW and not self.recent[0]:
            self.bad -= 1
        self.recent.append(usable)
        self.bad += not usable
        self.consecutive = 0 if usable else self.consecutive + 1
        share = self.bad / len(self.recent)
        if self.consecutive >= self.max_consecutive or (len(self.recent) >= MIN_SEEN and share > self.max_share):
            raise StreamRLError(
                f"expected usable trajectories, got {self.consecutive} unusable in a row and {share:.0%} of the last "
                f"{len(self.recent)}, up to {where}; read the reasons on the skips and dead-letters topics"
            )
