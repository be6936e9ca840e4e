"""The named points of the trainer's work at which it is killed, in the order in which it comes to them."""

from typing import Literal

from tests.chaos.crashing.points import CrashPoint

STEP = 5
"""The step in which most of them die: the one after a checkpoint, so that a whole step is undone."""
KEPT = 2
"""The checkpoint that is under way when a writer dies: that of step 4."""

CHECKPOINT = "streamrl.consumers.training.checkpoints.store:"
LOCAL = "streamrl.consumers.training.checkpoints.storage:"
EXPORT = "streamrl.weights.export:"
TRANSACTION = "aiokafka:AIOKafkaProducer."
"""The first two of a first life put the identity and the lineage on the control topic, the others announce."""


def around(name: str, target: str, nth: int, argument: str = "") -> tuple[CrashPoint, CrashPoint]:
    """Right before a call and right after it."""
    moments: tuple[Literal["before", "after"], Literal["before", "after"]] = ("before", "after")
    before, after = (CrashPoint(f"{moment} {name}", target, moment, nth, argument) for moment in moments)
    return before, after


def _start(name: str, point: str) -> CrashPoint:
    return CrashPoint(f"resuming: {name}", point, resumed=True)


BEGINNING = (
    CrashPoint("first life: identity held", "identity_held"),
    *around("the identity gets its place", "streamrl.consumers.training.identity_store:IdentityFile.swap", 1),
    CrashPoint("first life: older trainers fenced", "fenced"),
    *around("the lineage gets on the topic", "streamrl.consumers.training.identity:IdentityKeeper.claim", 1),
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
    *around("a gradient", "streamrl.consumers.training.step:PolicyLearner.accumulate", STEP),
    CrashPoint("a gradient added", "gradient_added", nth=STEP + 1),
    CrashPoint("the batch gathered", "batch_gathered", nth=STEP),
    *around("the optimizer step", "streamrl.consumers.training.step:PolicyLearner.finish_step", STEP),
    CrashPoint("the step applied", "step_applied", nth=STEP),
    *around("marking the records trained", "streamrl.consumers.ingest.ledger:Ledger.mark_trained", STEP),
    CrashPoint("the records marked", "trained_marked", nth=STEP),
    CrashPoint("the rest skipped", "left_out_skipped", nth=STEP),
)
WEIGHTS = (
    CrashPoint("the weights copied", "weights_copied", nth=STEP),
    *around("writing the exported weights", f"{EXPORT}save_file", STEP),
    *around("writing what they differ by from the last ones", f"{EXPORT}write_delta", STEP),
    *around("the exported weights get their name", "pathlib:Path.rename", 1, rf"{STEP}$"),
    CrashPoint("the weights exported", "weights_exported", nth=STEP),
    CrashPoint("the digests made", "digests_made", nth=STEP),
    CrashPoint("the report made", "report_made", nth=STEP),
)
SAVED = (
    CrashPoint("the stream's position taken", "snapshot_taken", nth=KEPT),
    CrashPoint("the skip rows settled", "rows_settled", nth=KEPT),
    *around("writing the model", "streamrl.consumers.training.policy:save_file", KEPT),
    *around("writing the optimizer", f"{CHECKPOINT}save_file", KEPT, r"optimizer"),
    *around("writing the random numbers' state", f"{CHECKPOINT}save_file", KEPT, r"rng"),
    *around("making the manifest", f"{LOCAL}encode_manifest", KEPT),
    *around("syncing the manifest", f"{LOCAL}sync", KEPT, r"manifest"),
    *around("the fence", "streamrl.consumers.training.checkpoints.catalogue:Lineage.check", 2 * KEPT),
    *around("the checkpoint gets its name", "pathlib:Path.rename", 1, r"checkpoints/step_4$"),
    *around("syncing the name", f"{LOCAL}sync", KEPT + 1, r"checkpoints$"),
    *around("pruning old checkpoints", f"{CHECKPOINT}CheckpointStore._prune", KEPT + 1),
    CrashPoint("the checkpoint written", "checkpoint_written", nth=KEPT),
)
ANNOUNCED = (
    CrashPoint("announcing", "announcing", nth=STEP),
    *around("beginning the transaction", f"{TRANSACTION}begin_transaction", STEP + 2),
    *around("sending the report", f"{TRANSACTION}send_batch", STEP + 2),
    *around("sending the offsets", f"{TRANSACTION}send_offsets_to_transaction", 1),
    *around("committing the transaction", f"{TRANSACTION}commit_transaction", STEP + 2),
    CrashPoint("announced", "announced", nth=STEP),
    *around("appending the metrics", "streamrl.consumers.training.trainer:append_metrics", STEP),
    CrashPoint("the metrics written", "metrics_written", nth=STEP),
    CrashPoint("the last report announced", "last_announced"),
    CrashPoint("reading ended", "reading_ended"),
)
POINTS: tuple[CrashPoint, ...] = (*BEGINNING, *GRADIENT, *WEIGHTS, *SAVED, *ANNOUNCED)

RANK = "streamrl.consumers.training.ranks."
_IN_ANOTHER_FILE = f"{CHECKPOINT}save_file"
"""Of a trainer of several ranks the optimizer's state is written elsewhere."""
POINTS_OF_RANKS: tuple[CrashPoint, ...] = (
    *(point for point in POINTS if not (point.target == _IN_ANOTHER_FILE and "optimizer" in point.argument)),
    *around("dealing a micro-batch", f"{RANK}learner:DealingLearner._deal_rows", STEP),
    *around("gathering the weights", f"{RANK}sharding:GatheredCopy.take", STEP),
    *around("writing the ranks' parts", f"{RANK}policy:RankedPolicy.write_parts", KEPT),
)
"""The same over ranks; where it is rank 0 that dies, its processes end as one of a single rank does."""
RANK_DIES: tuple[CrashPoint, ...] = (
    CrashPoint("another rank: a gradient", f"{RANK}learner:ShardLearner.add_gradient", "before", STEP, rank=1),
    CrashPoint("another rank: the optimizer step", f"{RANK}sharding:ShardedAdamW.scale", "before", STEP, rank=1),
    CrashPoint("another rank: its part written", f"{RANK}learner:ShardLearner.write_part", "after", KEPT, rank=1),
)
"""Another rank dies, and rank 0 has to end because of it."""

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
