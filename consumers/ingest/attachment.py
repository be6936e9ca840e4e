"""How an instance of the trainer that is not served stands to the run whose stream it reads. Waits for nothing.

Its own versions say nothing of how old a trajectory is, for other weights sampled it. So age is counted in *served*
versions: optimizer steps of the served policy between the oldest weights that sampled a token and those that are
announced now. Whoever follows the run's control topic keeps this up to date; ingest asks it for each record.
"""

from collections.abc import Mapping
from dataclasses import dataclass

from streamrl.schemas.identifiers import PolicyVersion

NOTHING_SERVED = PolicyVersion(0, 0)
ANY_STEP = 1 << 62
"""Due steps and ages are in the served policy's numbers: without a bound, none of them is too far."""


@dataclass(frozen=True)
class Promoted:
    """This policy is served, and was not from the run's beginning. ``since``: the newest version before it was;
    ``shift``: what its own numbers lack to be served ones; None: its next lineage begins one above ``since``.
    """

    since: PolicyVersion
    shift: int | None = None

    def shift_at(self, step: int) -> int:
        """The shift of a lineage that begins at this step of its own."""
        return self.since.number + 1 - step if self.shift is None else self.shift


@dataclass
class Attachment:
    """``run_id``: of the run, once known. ``begin``: where an instance without a checkpoint starts to read, as
    ``ingest.attach_from`` says it. ``served``: the newest weights that are announced to workers. ``is_paused``: it is
    to take no trajectories for now; ``run_is_over``: no more of them come. ``promoted``:
    this policy is the one that is served.
    """

    begin: str = "now"
    served: PolicyVersion = NOTHING_SERVED
    run_id: str = ""
    is_paused: bool = False
    run_is_over: bool = False
    promoted: Promoted | None = None


def offsets_in(begin: str) -> dict[int, int]:
    """By partition, the first offsets that ``0=120,1=95`` asks for.

    Raises:
        ValueError: it is of another form.
    """
    pairs = [part.split("=") for part in begin.split(",")]
    if not all(len(pair) == 2 and all(number.isascii() and number.isdigit() for number in pair) for pair in pairs):
        raise ValueError(f"expected now, beginning, or offsets by partition such as 0=120,1=95, got {begin!r}")
    offsets = {int(partition): int(offset) for partition, offset in pairs}
    if len(offsets) < len(pairs):
        raise ValueError(f"expected each partition once, got {begin!r}")
    return offsets


def first_wanted(begin: str, held: Mapping[int, tuple[int, int]]) -> dict[int, int]:
    """By partition: the first record to be trained of those that are ``held`` (the first, and the one after the last).
    A partition that ``begin`` does not name begins with its first.
    """
    match begin:
        case "now":
            return {partition: end for partition, (_, end) in held.items()}
        case "beginning":
            return {partition: first for partition, (first, _) in held.items()}
    wanted = offsets_in(begin)
    return {partition: min(max(wanted.get(partition, first), first), end) for partition, (first, end) in held.items()}
