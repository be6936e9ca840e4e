"""Which trajectories a role delivered more than once."""

from collections import Counter

from streamrl.bus.memory import MemoryBus
from streamrl.schemas.topics import TRAJECTORIES
from streamrl.schemas.trajectories import Trajectory
from tests.fakes.topics import messages_of


def doubled(bus: MemoryBus, run: str) -> list[str]:
    """One sentence for each of them."""
    counts = Counter(one.trajectory_id for one in messages_of(bus, run, TRAJECTORIES, Trajectory))
    return [f"{count} times on the topic: {name}" for name, count in counts.items() if count > 1]
