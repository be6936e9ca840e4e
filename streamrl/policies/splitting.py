"""A split for A/B tests: which worker samples with which policy's weights, and the effect of an operator's command.

An arm is a policy with a share of the groups. The served policy has the rest; here it is an arm like any other, with an
empty name. Pure, except for a log line.

Invariants, each with a test of its name:
- every_arm_has_a_worker, if there are at least as many workers as arms;
- workers_are_dealt_in_proportion: no arm could get one more worker and still have fewer for its share than another;
- few_workers_change_arms: a worker leaves its arm only if the arm has more than its due.
"""

from collections.abc import Collection, Mapping
from dataclasses import dataclass, field

import structlog
import xxhash

from streamrl.schemas.control import InstanceState, OperatorCommand, PolicySplit
from streamrl.schemas.identifiers import SERVED_ARM, SERVED_POLICY
from streamrl.schemas.messages import Message

log = structlog.get_logger()

SERVED = ""
"""The served policy's name as an arm."""
NOTHING = 1e-9
"""Rounding error allowed in the sum of shares."""


def counts_of(shares: Mapping[str, float], workers: int) -> dict[str, int]:
    """The number of workers of each arm, including the served policy's: one each, then in proportion.

    With fewer workers than arms, the arms with the largest shares get one each.
    """
    left = 1.0 - sum(shares.values())
    wanted = {**({SERVED: left} if left > NOTHING else {}), **shares}
    # The largest share first, equal ones by name, so that every process gets the same result.
    order = sorted(wanted, key=lambda arm: (-wanted[arm], arm))
    counts = {arm: int(place < workers) for place, arm in enumerate(order)}
    for _ in range(workers - len(order)):
        # Sainte-Laguë's divisors: with one more worker in total, no arm gets fewer.
        most = max(order, key=lambda arm: wanted[arm] / (2 * counts[arm] + 1))
        counts[most] += 1
    return counts


def deal_workers(shares: Mapping[str, float], workers: Collection[str], before: Mapping[str, str]) -> dict[str, str]:
    """The arm of each worker that has one; all others follow the served policy. ``before``: the current arms."""
    if not shares:
        return {}
    counts = counts_of(shares, len(workers))
    dealt: dict[str, str] = {}
    waiting = []
    for worker in sorted(workers):
        arm = before.get(worker, SERVED)
        if counts.get(arm, 0):
            counts[arm] -= 1
            dealt[worker] = arm
        else:
            waiting.append(worker)
    open_places = [arm for arm in sorted(counts) for _ in range(counts[arm])]
    dealt |= dict(zip(waiting, open_places, strict=True))
    return {worker: arm for worker, arm in dealt.items() if arm != SERVED}


@dataclass(frozen=True)
class SplitDecision:
    """The arms wanted from now on, with their shares; empty: the served policy samples everything."""

    shares: dict[str, float]
    reason: str = ""


def decide_split(
    command: OperatorCommand, known: Mapping[str, InstanceState], served: str, now: Mapping[str, float]
) -> SplitDecision | None:
    """The effect of a command.

    None if nothing changes, an arm is not attached or is served, or the shares add up to more than 1. The number of
    workers is not checked, since a command is judged again after a restart.
    """
    shares = {arm.policy: arm.share for arm in command.shares}
    is_sound = len(shares) == len(command.shares) and sum(shares.values()) <= 1 + NOTHING
    if not is_sound or shares == now or not all(may_be_arm(arm, known, served) for arm in shares):
        return None
    return SplitDecision(shares, command.reason)


def may_be_arm(policy: str, known: Mapping[str, InstanceState], served: str) -> bool:
    """Whether a policy can have a share: it is an attached instance or the run's own policy, and not the served one."""
    instance = known.get(policy)
    is_there = policy == SERVED_POLICY or (instance is not None and instance.mode != "detached")
    return is_there and policy != served


def arm_of(group_id: str, shares: Mapping[str, float]) -> str:
    """The arm of a split whose workers sample a group; empty: the served policy's.

    A hash of the group's name decides, so that the result is the same after any restart.
    """
    # Arms lie next to each other on [0, 1), the served policy's share after them.
    place, end = xxhash.xxh3_64_intdigest(group_id.encode()) / 2.0**64, 0.0
    for policy, share in shares.items():
        end += share
        if place < end:
            return policy
    return ""


class SplitSeries:
    """The series of weights that the current split wants: one per arm, named like its policy (``WantedSeries``)."""

    def __init__(self) -> None:
        self._split: PolicySplit | None = None
        self._dealt: dict[str, str] = {}

    def observe(self, message: Message) -> bool:
        """See ``WantedSeries``."""
        if not isinstance(message, PolicySplit):
            return False
        self._split = message
        return True

    @property
    def names(self) -> frozenset[str] | None:
        """The arms; None until a split was read from the control topic."""
        return None if self._split is None else frozenset(self._split.shares)

    def of_worker(self, worker_id: str) -> str:
        """The arm that the worker is assigned to."""
        arm = "" if self._split is None else self._split.workers.get(worker_id, "")
        if arm != self._dealt.get(worker_id, ""):
            log.info("dealt to another arm", arm=arm or SERVED_ARM)
        self._dealt[worker_id] = arm
        return arm


MOST_ARMS = 64
"""Bound on memory: names come from records, which any process may have written."""


@dataclass
class ArmRewards:
    """For each arm of a split, the number of trajectories with a reward, and the mean reward.

    The served policy's name is empty.
    """

    _sums: dict[str, tuple[int, float]] = field(default_factory=dict)

    def add(self, arm: str, reward: float | None) -> None:
        """Count a trajectory."""
        if reward is None or (arm not in self._sums and len(self._sums) >= MOST_ARMS):
            return
        count, total = self._sums.get(arm, (0, 0.0))
        self._sums[arm] = count + 1, total + reward

    def of(self, arm: str) -> tuple[int, float | None]:
        """Number of rewards and their mean; the mean is None before the first."""
        count, total = self._sums.get(arm, (0, 0.0))
        return count, total / count if count else None
