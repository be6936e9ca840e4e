"""What a worker knows of itself: its parts write it down, its heartbeats say it."""

import asyncio
from dataclasses import dataclass, field

from streamrl.schemas.identifiers import PolicyVersion
from streamrl.schemas.reports import ReleasedOrder, WorkerState

NO_VERSION = PolicyVersion(0, 0)
"""Held by a worker that has no weights yet; trainers count lineages from 1."""


@dataclass
class WorkerStatus:
    """State of one incarnation of a worker. Each field has one writer, and any part may read it.

    - The session writes ``state``.
    - The adopter writes ``version`` and ``policy`` of the weights in the engine, ``next_policy`` of those that it is to
      bring next, and ``awaits``: the version that waits until nothing runs. The served policy's name is empty.
    - The follower of control writes ``run_id``.
    - ``Releases`` writes ``released``, and the partial pool ``partials_from``; None where the worker keeps no partials.
    - Side work writes ``request_address``, where gateways connect, and which evaluation orders it declined.

    The next heartbeat says what was assigned. The methods send one at once, by ``wake``, if they change anything.
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
    """By group: which attempt, and until when heartbeats say so."""

    def wake(self) -> None:
        """Send a heartbeat at once."""
        self.changed.set()

    @property
    def has_weights(self) -> bool:
        """Whether the engine has any weights."""
        return self.version != NO_VERSION

    @property
    def is_of_an_arm(self) -> bool:
        """Whether the engine has, or is to have, weights that only the orders of an arm of a split are for."""
        return bool(self.policy or self.next_policy)

    @property
    def is_leaving(self) -> bool:
        """Whether the worker starts nothing any more."""
        return self.state in (WorkerState.DRAINING, WorkerState.STOPPED)

    def set_state(self, state: WorkerState) -> None:
        """The worker is in this state."""
        if state != self.state:
            self.state = state
            self.wake()

    def set_weights(self, version: PolicyVersion, policy: str) -> None:
        """The engine has this version of a policy's weights."""
        if (version, policy) != (self.version, self.policy):
            self.version, self.policy = version, policy
            self.wake()

    def set_next_policy(self, policy: str) -> None:
        """The next weights are this policy's; no heartbeat says so before the engine has them."""
        self.next_policy = policy

    def await_idle(self, version: PolicyVersion | None) -> None:
        """This version waits until nothing runs; None: no version does any more."""
        if version != self.awaits:
            self.awaits = version
            self.wake()

    def take_requests_at(self, address: str) -> None:
        """Gateways connect here."""
        self.request_address = address
        self.wake()

    def decline(self, group_id: str, attempt: int, until: float) -> None:
        """An evaluation order was not taken; heartbeats say so ``until`` then, in seconds of the monotonic clock."""
        self._declined[group_id] = attempt, until
        self.wake()

    def declined(self, now: float) -> dict[str, int]:
        """Evaluation orders not taken lately: by group, the attempt."""
        self._declined = {name: entry for name, entry in self._declined.items() if entry[1] > now}
        return {name: attempt for name, (attempt, _) in self._declined.items()}
