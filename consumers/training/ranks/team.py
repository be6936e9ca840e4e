"""Rank 0's connection to the other ranks: starts their processes, sends messages, and notices when one is gone.

The other ranks end when rank 0 ends for any reason: a thread in each waits for its socket to close, even while the main
thread waits in a collective operation. Invariants:
- no_rank_outlives_rank_0;
- a_lost_rank_ends_the_trainer, with one line that says why, within seconds: a collective operation that waits for the
  lost rank fails. If none does, or it is stuck, this process ends itself. The supervisor restarts all ranks.
"""

import atexit
import os
import queue
import socket
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any, ClassVar, Protocol

import structlog

from streamrl.consumers.training.ranks.wire import RankMessage, Wire
from streamrl.schemas import errors
from streamrl.schemas.errors import RankLost, StreamRLError, UserError
from streamrl.schemas.import_path import module_command

log = structlog.get_logger()

PATIENCE_S = 600.0
"""Seconds that a rank may take for one piece of work, such as loading the model; after them it counts as lost."""
GRACE_S = 5.0
"""Seconds from the loss of a rank until this process ends itself, unless a call that waits for the rank fails first."""
CLOSING_S = 10.0
"""Seconds that a rank's process has to end before it is killed."""
FAILED = "failed"


class RankProcess(Protocol):
    """The part of ``subprocess.Popen`` that a rank's process needs."""

    def wait(self, timeout: float | None = None) -> int:
        """Wait for the end of the process; returns its exit code.

        Raises:
            subprocess.TimeoutExpired: it still runs.
        """
        ...

    def kill(self) -> None:
        """Send SIGKILL."""
        ...


StartRank = Callable[[socket.socket], RankProcess]


def start_rank(end: socket.socket) -> RankProcess:
    """A new Python process that serves this end; it shares our standard output and error."""
    number = end.fileno()
    command = module_command("streamrl.consumers.training.ranks.member", str(number))
    return subprocess.Popen(command, pass_fds=[number], stdin=subprocess.DEVNULL)  # noqa: S603 — our own module


@dataclass
class _Member:
    rank: int
    wire: Wire
    process: RankProcess
    answers: "queue.SimpleQueue[RankMessage | None]" = field(default_factory=queue.SimpleQueue)


class Team:
    """Ranks 1 to N - 1. Only one thread at a time may talk to them.

    ``end_process`` ends this process if the loss of a rank is not raised to a caller within ``grace_s`` seconds.
    """

    current: ClassVar["Team | None"] = None
    """The team of this process, which trains one policy at a time."""

    def __init__(
        self,
        ranks: int,
        start: StartRank | None = None,
        end_process: Callable[[int], Any] = os._exit,
        grace_s: float = GRACE_S,
    ) -> None:
        if Team.current is not None:
            Team.current.close()
        self.ranks = ranks
        self._end_process = end_process
        self._grace_s = grace_s
        self._lock = threading.Lock()
        self._lost: StreamRLError | None = None
        self._is_lost, self._is_raised = threading.Event(), threading.Event()
        self._is_closing = False
        self._members: list[_Member] = []
        Team.current = self
        atexit.register(self.close)  # after an end without it, such as SIGKILL, the other ranks end by themselves
        for rank in range(1, ranks):
            ours, theirs = socket.socketpair()
            with theirs:
                process = (start or start_rank)(theirs)
            member = _Member(rank, Wire(ours), process)
            self._members.append(member)
            threading.Thread(target=self._listen, args=(member,), name=f"rank-{rank}", daemon=True).start()

    def tell(self, word: str, **values: Any) -> None:
        """Send the same message to all ranks."""
        self.send_to_each([RankMessage(word, values)] * len(self._members))

    def send_to_each(self, messages: Sequence[RankMessage]) -> None:
        """Send each rank its own message, in the order of the ranks from 1.

        Raises:
            RankLost: one is gone.
        """
        for member, message in zip(self._members, messages, strict=True):
            try:
                member.wire.send(message)
            except OSError as error:
                self._record_loss(member, f"is gone ({error})")
                raise self._loss() from error

    def answers(self) -> list[RankMessage]:
        """The next answer of each rank, in the order of the ranks from 1.

        Raises:
            RankLost: one is gone, or does not answer.
        """
        found = []
        for member in self._members:
            try:
                answer = member.answers.get(timeout=PATIENCE_S)
            except queue.Empty:
                self._record_loss(member, f"has not answered for {PATIENCE_S:.0f} s")
                answer = None
            if answer is None:
                raise self._loss()
            found.append(answer)
        return found

    @contextmanager
    def together(self) -> Iterator[None]:
        """Encloses work in which ranks wait for each other: if it fails because a rank is lost, that loss is raised."""
        try:
            yield
        except StreamRLError:
            self._is_raised.set()
            raise
        except RuntimeError as error:
            # A collective operation fails at about the time at which the listening thread learns the reason.
            if not self._is_lost.wait(self._grace_s / 2):
                raise
            raise self._loss() from error

    def close(self) -> None:
        """End all other ranks, and wait for them; kill those that still run after ``CLOSING_S``."""
        with self._lock:
            if self._is_closing:
                return
            self._is_closing = True
        atexit.unregister(self.close)
        if Team.current is self:
            Team.current = None
        for member in self._members:
            member.wire.close()  # a closed socket ends the rank
        for member in self._members:
            try:
                member.process.wait(CLOSING_S)
            except subprocess.TimeoutExpired:
                member.process.kill()
                member.process.wait(CLOSING_S)

    def _loss(self) -> StreamRLError:
        self._is_raised.set()
        with self._lock:
            return self._lost or RankLost("expected running ranks, found them closed")

    def _listen(self, member: _Member) -> None:
        while (message := member.wire.receive()) is not None:
            if message.word == FAILED:
                self._record_loss(member, str(message.values["problem"]), message.values)
            else:
                member.answers.put(message)
        self._record_loss(member, "is gone: its process ended without a message")

    def _record_loss(self, member: _Member, problem: str, values: Mapping[str, Any] | None = None) -> None:
        """Record that a rank is lost. Only the first loss counts, since it may cause others."""
        with self._lock:
            if self._is_closing or self._lost is not None:
                return
            kind = getattr(errors, str((values or {}).get("kind")), RankLost)
            if isinstance(kind, type) and issubclass(kind, UserError):
                self._lost = kind(f"{problem} (rank {member.rank} of {self.ranks})")
            else:
                self._lost = RankLost(
                    f"expected {self.ranks} ranks that train together, got: rank {member.rank} {problem}; "
                    "all of them restart from the newest checkpoint"
                )
            lost = self._lost
        self._is_lost.set()
        log.error("a rank is lost", rank=member.rank, problem=str(lost))
        for each in self._members:
            each.answers.put(None)
        threading.Thread(target=self._end_unless_raised, args=(lost,), name="lost-rank", daemon=True).start()

    def _end_unless_raised(self, lost: StreamRLError) -> None:
        if self._is_raised.wait(self._grace_s) or self._is_closing:
            return
        sys.stderr.write(f"error: {lost}\n")
        sys.stderr.flush()
        self._end_process(lost.exit_code)
