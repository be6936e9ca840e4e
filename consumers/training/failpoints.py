"""The failpoints of the trainer: named moments at which tests watch it, stop it, or kill it.

A process that dies at any of them is resumed without loss or repeat.
"""

from collections.abc import Callable
from enum import StrEnum


class Failpoint(StrEnum):
    """Failpoints in the order in which a process passes them; each has the name of the act just before it.

    A step's failpoints from ``WEIGHTS_EXPORTED`` to ``REPORT_MADE``, and from ``ANNOUNCING`` to ``ANNOUNCED``, may be
    passed while the groups of the next step are taken.
    """

    IDENTITY_HELD = "identity_held"
    FENCED = "fenced"
    LINEAGE_CLAIMED = "lineage_claimed"
    RESTORED = "restored"
    POLICY_OPENED = "policy_opened"
    START_EXPORTED = "start_exported"
    START_ANNOUNCED = "start_announced"

    GROUP_TAKEN = "group_taken"
    GROUP_SKIPPED = "group_skipped"
    GROUP_CREDITED = "group_credited"
    GRADIENT_ADDED = "gradient_added"
    BATCH_GATHERED = "batch_gathered"
    STEP_APPLIED = "step_applied"
    STEP_REFUSED = "step_refused"
    TRAINED_MARKED = "trained_marked"
    LEFT_OUT_SKIPPED = "left_out_skipped"
    WEIGHTS_COPIED = "weights_copied"
    WEIGHTS_EXPORTED = "weights_exported"
    DIGESTS_MADE = "digests_made"
    REPORT_MADE = "report_made"
    SNAPSHOT_TAKEN = "snapshot_taken"
    ROWS_SETTLED = "rows_settled"
    CHECKPOINT_WRITTEN = "checkpoint_written"
    ANNOUNCING = "announcing"
    ANNOUNCED = "announced"
    METRICS_WRITTEN = "metrics_written"

    STOP_SEEN = "stop_seen"
    GRADIENT_DROPPED = "gradient_dropped"
    LAST_ANNOUNCED = "last_announced"
    READING_ENDED = "reading_ended"


FailpointHook = Callable[[Failpoint], None]


def no_failpoint(_point: Failpoint) -> None:
    """Do nothing at a failpoint: the default outside tests."""
