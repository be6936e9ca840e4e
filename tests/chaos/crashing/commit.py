"""The named points of the trainer's work at which it is killed, in the order in which it comes to them."""

from typing import Literal

from tests.chaos.crashing.points import CrashPoint

STEP = 5
"""The step in which most of them die: the one after a checkpoint, so that a whole step is undone."""
KEPT = 2
"""The checkpoint that is under way when a writer dies: that of step 4."""

CHECKPOINT = "consumers.training.checkpoints.store:"
LOCAL = "consumers.training.checkpoints.storage:"
EXPORT = "consumers.training.weight_export:"
TRANSACTION = "aiokafka:AIOKafkaProducer."
"""The first two of a first life put the identity and the lineage on the control topic, the others announce."""


def _around(name: str, target: str, nth: int, argument: str = "") -> tuple[CrashPoint, CrashPoint]:
    moments: tuple[Literal["before", "after"], Literal["before", "after"]] = ("before", "after")
    before, after = (CrashPoint(f"{moment} {name}", target, moment, nth, argument) for moment in moments)
    return before, after


def _start(name: str, point: str) -> CrashPoint:
    return CrashPoint(f"resuming: {name}", point, resumed=True)


BEGINNING = (
    CrashPoint("first life: identity held", "identity_held"),
    *_around("the identity gets its place", "consumers.training.identity_store:IdentityFile.swap", 1),
    CrashPoint("first life: older trainers fenced", "fenced"),
    *_around("the lineage gets on the topic", "consumers.training.identity:IdentityKeeper.claim", 1),
    CrashPoint("first life: lineage claimed", "lineage_claimed"),
    CrashPoint("first life: start announced", "start_announced"),
    _start("identity held", "identity_held"),
    _start("older trainers fenced", "fenced"),
    _start("lineage claimed", "lineage_claimed"),
    _start("checkpoint restored", "restored"),
    _start("policy opened", "policy_opened"),
    _start("weights exported", "start_exported"),
    _start("start announced", "start_announced"),
)
GRADIENT = (
    CrashPoint("a group taken", "group_taken", nth=2 * STEP),
    CrashPoint("a group skipped", "group_skipped"),
    CrashPoint("a group credited", "group_credited", nth=2 * STEP),
    *_around("a gradient", "consumers.training.step:PolicyLearner.accumulate", STEP),
    CrashPoint("a gradient added", "gradient_added", nth=STEP + 1),
    CrashPoint("the batch gathered", "batch_gathered", nth=STEP),
    *_around("the optimizer step", "consumers.training.step:PolicyLearner.finish_step", STEP),
    CrashPoint("the step applied", "step_applied", nth=STEP),
    *_around("marking the records trained", "consumers.ingest.ledger:Ledger.mark_trained", STEP),
    CrashPoint("the records marked", "trained_marked", nth=STEP),
    CrashPoint("the rest skipped", "left_out_skipped", nth=STEP),
)
WEIGHTS = (
    CrashPoint("the weights copied", "weights_copied", nth=STEP),
    *_around("writing the exported weights", f"{EXPORT}save_file", STEP),
    *_around("writing what they differ by from the last ones", f"{EXPORT}write_delta", STEP),
    *_around("the exported weights get their name", "pathlib:Path.rename", 1, rf"{STEP}$"),
    CrashPoint("the weights exported", "weights_exported", nth=STEP),
    CrashPoint("the digests made", "digests_made", nth=STEP),
    CrashPoint("the report made", "report_made", nth=STEP),
)
SAVED = (
    CrashPoint("the stream's position taken", "snapshot_taken", nth=KEPT),
    CrashPoint("the skip rows settled", "rows_settled", nth=KEPT),
    *_around("writing the model", "consumers.training.policy:save_file", KEPT),
    *_around("writing the optimizer", f"{CHECKPOINT}save_file", KEPT, r"optimizer"),
    *_around("writing the random numbers' state", f"{CHECKPOINT}save_file", KEPT, r"rng"),
    *_around("making the manifest", f"{LOCAL}encode_manifest", KEPT),
    *_around("syncing the manifest", f"{LOCAL}sync", KEPT, r"manifest"),
    *_around("the fence", "consumers.training.checkpoints.catalogue:Lineage.check", 2 * KEPT),
    *_around("the checkpoint gets its name", "pathlib:Path.rename", 1, r"checkpoints/step_4$"),
    *_around("syncing the name", f"{LOCAL}sync", KEPT + 1, r"checkpoints$"),
    *_around("forgetting old checkpoints", f"{CHECKPOINT}CheckpointStore._forget_old", KEPT + 1),
    CrashPoint("the checkpoint written", "checkpoint_written", nth=KEPT),
)
ANNOUNCED = (
    CrashPoint("announcing", "announcing", nth=STEP),
    *_around("beginning the transaction", f"{TRANSACTION}begin_transaction", STEP + 2),
    *_around("sending the report", f"{TRANSACTION}send_batch", STEP + 2),
    *_around("sending the offsets", f"{TRANSACTION}send_offsets_to_transaction", 1),
    *_around("committing the transaction", f"{TRANSACTION}commit_transaction", STEP + 2),
    CrashPoint("announced", "announced", nth=STEP),
    *_around("appending the metrics", "consumers.training.trainer:append_metrics", STEP),
    CrashPoint("the metrics written", "metrics_written", nth=STEP),
    CrashPoint("the last report announced", "last_announced"),
    CrashPoint("reading ended", "reading_ended"),
)
POINTS: tuple[CrashPoint, ...] = (*BEGINNING, *GRADIENT, *WEIGHTS, *SAVED, *ANNOUNCED)

BEFORE_RESUMING = CrashPoint("the step applied", "step_applied", nth=STEP)
SAMPLE = frozenset(
    {
        "the step applied",
        "after writing the optimizer",
        "before the checkpoint gets its name",
        "before committing the transaction",
        "resuming: start announced",
    }
)
"""Points that every test run tries; `make chaos` tries all."""
