"""Counts groups that were skipped in a row, says why, and ends a trainer that could wait for ever.

Invariant a_run_that_finds_nothing_to_train_ends: if no group of ``IntakeLimits.end_after`` in a row could be trained,
the trainer stops with the causes and an example. Groups that are skipped only for their age or place in the stream do
not count: newer groups can be trained.
"""

from collections import Counter
from dataclasses import dataclass, field

import structlog

from streamrl.schemas.errors import NothingToTrain
from streamrl.schemas.reports import SkipReason

log = structlog.get_logger()

ADVICE = {
    SkipReason.ZERO_ADVANTAGE: "give prompts whose samples earn different rewards, or correct the reward function",
    SkipReason.FILTERED: "look at the rule that the detail names",
    SkipReason.REFUSED: "correct the prompts (streamrl run --dry-run says how many and why)",
    SkipReason.POISON: "correct the reward function or the engine",
    SkipReason.OUT_OF_MEMORY: "lower loop.max_completion_length or batching.token_budget",
    SkipReason.GROUP_INCOMPLETE: "look at the workers' logs for the missing samples",
}
"""What to do about each reason that counts. All other reasons pass with time."""
WARNINGS = 4
"""Warnings before the end, at equal distances."""


@dataclass
class SkipStreak:
    """The groups skipped since the last one that could be trained. ``end_after``: number of groups that end the run."""

    end_after: int
    groups: int = 0
    reasons: Counter[SkipReason] = field(default_factory=Counter)

    def end(self) -> None:
        """Note a group that can be trained."""
        self.groups = 0
        self.reasons.clear()

    def add(self, group_id: str, reason: SkipReason, detail: str) -> None:
        """Note a skipped group. A reason that passes with time is ignored.

        Raises:
            NothingToTrain: too many in a row.
        """
        if reason not in ADVICE:
            return
        self.groups += 1
        self.reasons[reason] += 1
        if self.groups % max(1, self.end_after // WARNINGS) == 0:
            log.warning(self._text(group_id, detail), reason=reason.value, ends_after=self.end_after)
        if self.groups >= self.end_after:
            common = self.reasons.most_common(1)[0][0]
            raise NothingToTrain(f"{self._text(group_id, detail)}; {ADVICE[common]}")

    def _text(self, group_id: str, detail: str) -> str:
        counts = ", ".join(f"{count} {reason.value}" for reason, count in self.reasons.most_common())
        return (
            f"expected groups that can be trained, got {self.groups} skipped in a row ({counts}), "
            f"the latest {group_id}: {detail}"
        )
