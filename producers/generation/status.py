"""A worker's status: its parts write it, its heartbeats report it."""

import asyncio
from dataclasses import dataclass, field

from streamrl.schemas.identifiers import PolicyVersion
from streamrl.schemas.reports import ReleasedOrder, WorkerState

NO_VERSION = PolicyVersion(0, 0)
"""Version of a worker without weights; trainers number lineages from 1."""


@dataclass
class WorkerStatus:
    """Status of one incarnation of a worker. Each field has one writer, and any part may read it.

    - The session writes ``state``.
    - The adopter writes ``version`` and ``policy`` of the weights in the engine, ``next_policy`` of the weights that
      come next, and ``awaits``: the version that waits until nothing runs. The served policy's name is empty.
    - The follower of control writes ``run_id``.
    - ``Releases`` writes ``released``, and the partial pool ``partials_from``; None if the worker keeps no partials.
    - Side work writes ``request_address``, where gateways connect, and the evaluation orders that it declined.

    The next heartbeat reports assigned fields. A method that changes something sends a heartbeat at once, by ``wake``.
    """

    state: WorkerState = WorkerState.STARTING
    version: PolicyVersion = NO_VERSION
    policy: str = ""
    next_policy: str = ""
    awaits: PolicyVersion | None = None
    run_id: str | None = None
    released: tuple[ReleasedOrder, ...] | None = None
    partials_from: int | None = None
    request_address: str | None = None
    changed: asyncio.Event = field(init=False, default_factory=asyncio.Event)
    _declined: dict[str, tuple[int, float]] = field(init=False, default_factory=dict)
    """By group id: the declined attempt, and the time until which heartbeats report it."""

    def wake(self) -> None:
        """Send a heartbeat at once."""
        self.changed.set()

    @property
    def has_weights(self) -> bool:
        """Whether the engine has any weights."""
        return self.version != NO_VERSION

    @property
    def has_arm_weights(self) -> bool:
        """Whether the engine has, or will have, weights of an arm of a split, which are for that arm's orders only."""
        return bool(self.policy or self.next_policy)

    @property
    def is_leaving(self) -> bool:
        """Whether the worker starts no new samples."""
        return self.state in (WorkerState.DRAINING, WorkerState.STOPPED)

    def set_state(self, state: WorkerState) -> None:
        """Set the worker's state."""
        if state != self.state:
            self.state = state
            self.wake()

    def set_weights(self, version: PolicyVersion, policy: str) -> None:
        """Set the version and policy of the weights in the engine."""
        if (version, policy) != (self.version, self.policy):
            self.version, self.policy = version, policy
            self.wake()

    def set_next_policy(self, policy: str) -> None:
        """Set the policy of the next weights. Heartbeats do not report it before the engine has them."""
        self.next_policy = policy

    def await_idle(self, version: PolicyVersion | None) -> None:
        """Set the version that waits until nothing runs; None: no version waits."""
        if version != self.awaits:
            self.awaits = version
            self.wake()

    def set_request_address(self, address: str) -> None:
        """Set the address at which gateways connect."""
        self.request_address = address
        self.wake()

    def decline(self, group_id: str, attempt: int, until: float) -> None:
        """Note a declined evaluation order. Heartbeats report it ``until`` then, in seconds of the monotonic clock."""
        self._declined[group_id] = attempt, until
        self.wake()

    def declined(self, now: float) -> dict[str, int]:
        """Recently declined evaluation orders: the attempt, by group id."""
        self._declined = {name: entry for name, entry in self._declined.items() if entry[1] > now}
        return {name: attempt for name, (attempt, _) in self._declined.items()}
