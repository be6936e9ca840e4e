"""A split for A/B: which worker samples with which policy's weights, and what an order of one leads to. Pure but
for a line of log.

An arm is a policy beside the served one with a share of the groups; the served policy has the rest, and is an arm like
any other here, without a name.

Invariants, each with a test of its name:
- every_arm_has_a_worker, as long as there are as many workers as arms;
- workers_are_dealt_in_proportion: nobody could have one more worker and still have fewer for its share than another;
- few_workers_change_arms: nobody leaves an arm that has no more than its due.
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
"""Shares add up to 1 but for what is lost in rounding."""


def counts_of(shares: Mapping[str, float], workers: int) -> dict[str, int]:
    """How many workers each arm gets, the served policy's included: one each, then in proportion.

    With fewer workers than arms those of the largest shares have one.
    """
    left = 1.0 - sum(shares.values())
    wanted = {**({SERVED: left} if left > NOTHING else {}), **shares}
    # The largest share first, and by name where they are equal, so that everybody comes to the same.
    order = sorted(wanted, key=lambda arm: (-wanted[arm], arm))
    counts = {arm: int(place < workers) for place, arm in enumerate(order)}
    for _ in range(workers - len(order)):
        # Sainte-Laguë's divisors: one worker more for all never takes one from an arm.
        most = max(order, key=lambda arm: wanted[arm] / (2 * counts[arm] + 1))
        counts[most] += 1
    return counts


def deal_workers(shares: Mapping[str, float], workers: Collection[str], before: Mapping[str, str]) -> dict[str, str]:
    """The arm of each worker that gets one; all others follow the served policy. ``before``: as they are dealt now."""
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
    """The arms that are wanted from now on, with their shares; none: all is the served policy's."""

    shares: dict[str, float]
    reason: str = ""


def decide_split(
    command: OperatorCommand, known: Mapping[str, InstanceState], served: str, now: Mapping[str, float]
) -> SplitDecision | None:
    """What a command leads to, or none: it is so already, an arm is not attached or is served, or shares are above 1.

    Whether there are enough workers is not asked, since a command is judged again after a restart.
    """
    shares = {arm.policy: arm.share for arm in command.shares}
    is_sound = len(shares) == len(command.shares) and sum(shares.values()) <= 1 + NOTHING
    if not is_sound or shares == now or not all(may_be_arm(arm, known, served) for arm in shares):
        return None
    return SplitDecision(shares, command.reason)


def may_be_arm(policy: str, known: Mapping[str, InstanceState], served: str) -> bool:
    """Whether a policy can have a share beside the served one: an instance that is attached, or the run's own."""
    instance = known.get(policy)
    is_there = policy == SERVED_POLICY or (instance is not None and instance.mode != "detached")
    return is_there and policy != served


def arm_of(group_id: str, shares: Mapping[str, float]) -> str:
    """The arm of a split whose workers sample a group; empty: the served policy's.

    By a hash of its name alone, so that it is the same after a restart of everything.
    """
    # Arms lie side by side on [0, 1), the served policy's share behind them.
    place, end = xxhash.xxh3_64_intdigest(group_id.encode()) / 2.0**64, 0.0
    for policy, share in shares.items():
        end += share
        if place < end:
            return policy
    return ""


class SplitSeries:
    """The series of weights that the split of now wants: one each arm, named like its policy (``WantedSeries``)."""

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
        """The arms; None until a split was heard of."""
        return None if self._split is None else frozenset(self._split.shares)

    def of_worker(self, worker_id: str) -> str:
        """The arm that it is dealt to."""
        arm = "" if self._split is None else self._split.workers.get(worker_id, "")
        if arm != self._dealt.get(worker_id, ""):
            log.info("dealt to another arm", arm=arm or SERVED_ARM)
        self._dealt[worker_id] = arm
        return arm


MOST_ARMS = 64
"""Names come from records that anybody may have written."""


@dataclass
class ArmRewards:
    """What each arm of a split sampled: trajectories with a reward, and its mean. The served policy's name is empty."""

    _sums: dict[str, tuple[int, float]] = field(default_factory=dict)

    def add(self, arm: str, reward: float | None) -> None:
        """A trajectory came."""
        if reward is None or (arm not in self._sums and len(self._sums) >= MOST_ARMS):
            return
        count, total = self._sums.get(arm, (0, 0.0))
        self._sums[arm] = count + 1, total + reward

    def of(self, arm: str) -> tuple[int, float | None]:
        """Number and mean; no mean before the first."""
        count, total = self._sums.get(arm, (0, 0.0))
        return count, total / count if count else None
