"""The named points at which workers, dispatchers and relays are killed: where tokens and weights change hands.

What they leave is judged by the run's books, since no second run samples the same.
"""

from tests.chaos.crashing.commit import around
from tests.chaos.crashing.points import CrashPoint

PARTIALS = "streamrl.producers.generation.partials:"
RELEASES = "streamrl.producers.generation.releases:"
DISPATCHER = "streamrl.producers.dispatch.dispatcher:Dispatcher."
COPIES = "streamrl.weights.relay.copies:"
IS_CONTINUED = r"partials=\(PartialSource"
"""Of an order: an earlier attempt left tokens."""
TAKES_BACK = r"release-order"

CHUNKS = (
    *around("a chunk is published", f"{PARTIALS}PartialLog._deliver", 12),
    *around("what is delivered is retired", f"{PARTIALS}PartialLog._retire", 5),
)
CONTINUED = (
    *around("a completion is gone on with", f"{PARTIALS}PartialPool.begin", 1, IS_CONTINUED),
    CrashPoint("after its first own chunk", f"{PARTIALS}PartialLog._deliver", "after", 1, r"parts=\(TrajectoryPart"),
)
LET_GO = (
    CrashPoint("asked to let go", f"{RELEASES}Releases.take_back", "before"),
    CrashPoint("the engine has handed over", f"{RELEASES}_write", "before"),
    CrashPoint("the last tokens are on record", f"{RELEASES}_write", "after"),
    CrashPoint("let go, and no heartbeat told", f"{RELEASES}Releases._hand_over", "after"),
)
TAKEN_BACK = (
    *around("orders are taken back", f"{DISPATCHER}_commit", 1, TAKES_BACK),
    *around("what was let go of is ordered again", "streamrl.producers.dispatch.repack:Repacker.target", 1),
)
COPIED = (
    CrashPoint("after a chunk of weights", f"{COPIES}ArrivingFile.append", "after", 2),
    CrashPoint("before the files of a version are whole", f"{COPIES}ArrivingFile.finish", "before", 2),
    *around("a version gets its name", f"{COPIES}VersionCopy.move_to", 1),
)
ALL = (*CHUNKS, *CONTINUED, *LET_GO, *TAKEN_BACK, *COPIED)
