"""Rank 0's hold on the other ranks: starts their processes, talks to them, and notices when one is gone.

The others end when rank 0 does, however it ends: each waits for the end of its socket in a thread of its own, also
while its main thread waits in a collective operation. Invariants:
- no_rank_outlives_rank_0;
- a_lost_rank_ends_the_trainer, with one line that says why, within seconds: what waits for it in a collective operation
  fails, and if nothing does, or it is stuck, this process ends itself. The supervisor starts all of them again.
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

from streamrl.consumers.training.ranks.wire import Told, Wire
from streamrl.schemas import errors
from streamrl.schemas.errors import RankLost, StreamRLError, UserError
from streamrl.schemas.import_path import own_command

log = structlog.get_logger()

PATIENCE_S = 600.0
"""How long a rank may take for one piece of work, such as loading the model: then it counts as lost."""
GRACE_S = 5.0
"""From the loss of a rank until this process ends itself, if what waits for that rank does not fail before."""
CLOSING_S = 10.0
FAILED = "failed"


class RankProcess(Protocol):
    """As much of ``subprocess.Popen`` as is needed of a rank's process."""

    def wait(self, timeout: float | None = None) -> int:
        """Its exit code.

        Raises:
            subprocess.TimeoutExpired: it still runs.
        """
        ...

    def kill(self) -> None:
        """SIGKILL."""
        ...


StartRank = Callable[[socket.socket], RankProcess]


def start_rank(end: socket.socket) -> RankProcess:
    """A fresh Python that serves this end; its output goes where ours does."""
    number = end.fileno()
    command = own_command("streamrl.consumers.training.ranks.member", str(number))
    return subprocess.Popen(command, pass_fds=[number], stdin=subprocess.DEVNULL)  # noqa: S603 — our own module


@dataclass
class _Member:
    rank: int
    wire: Wire
    process: RankProcess
    answers: "queue.SimpleQueue[Told | None]" = field(default_factory=queue.SimpleQueue)


class Team:
    """Ranks 1 to N - 1. One thread at a time talks to them; ``end_process`` is for what cannot be told in time."""

    current: ClassVar["Team | None"] = None
    """A process trains one policy at a time."""

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
        self._is_lost, self._is_told = threading.Event(), threading.Event()
        self._is_closing = False
        self._members: list[_Member] = []
        Team.current = self
        atexit.register(self.close)  # an end without it, such as SIGKILL, is the end of the others as well
        for rank in range(1, ranks):
            ours, theirs = socket.socketpair()
            with theirs:
                process = (start or start_rank)(theirs)
            member = _Member(rank, Wire(ours), process)
            self._members.append(member)
            threading.Thread(target=self._listen, args=(member,), name=f"rank-{rank}", daemon=True).start()

    def tell(self, word: str, **values: Any) -> None:
        """Tell all the same."""
        self.tell_each([Told(word, values)] * len(self._members))

    def tell_each(self, told: Sequence[Told]) -> None:
        """Tell each its own, in the order of the ranks from 1.

        Raises:
            RankLost: one is gone.
        """
        for member, message in zip(self._members, told, strict=True):
            try:
                member.wire.send(message)
            except OSError as error:
                self._note(member, f"is gone ({error})")
                raise self._loss() from error

    def answers(self) -> list[Told]:
        """The next answer of each, in the order of the ranks from 1.

        Raises:
            RankLost: one is gone, or does not answer.
        """
        found = []
        for member in self._members:
            try:
                answer = member.answers.get(timeout=PATIENCE_S)
            except queue.Empty:
                self._note(member, f"has not answered for {PATIENCE_S:.0f} s")
                answer = None
            if answer is None:
                raise self._loss()
            found.append(answer)
        return found

    @contextmanager
    def together(self) -> Iterator[None]:
        """Work in which ranks wait for each other: if it fails because one is gone, that is what is raised."""
        try:
            yield
        except StreamRLError:
            self._is_told.set()
            raise
        except RuntimeError as error:
            # A collective operation fails at the same moment at which the thread below learns why.
            if not self._is_lost.wait(self._grace_s / 2):
                raise
            raise self._loss() from error

    def close(self) -> None:
        """End all, and wait until they have; what is left of them then is killed."""
        with self._lock:
            if self._is_closing:
                return
            self._is_closing = True
        atexit.unregister(self.close)
        if Team.current is self:
            Team.current = None
        for member in self._members:
            member.wire.close()  # which is the word to end
        for member in self._members:
            try:
                member.process.wait(CLOSING_S)
            except subprocess.TimeoutExpired:
                member.process.kill()
                member.process.wait(CLOSING_S)

    def _loss(self) -> StreamRLError:
        self._is_told.set()
        with self._lock:
            return self._lost or RankLost("expected the ranks to be there, got: they were closed")

    def _listen(self, member: _Member) -> None:
        while (told := member.wire.receive()) is not None:
            if told.word == FAILED:
                self._note(member, str(told.values["problem"]), told.values)
            else:
                member.answers.put(told)
        self._note(member, "is gone: its process ended without a word")

    def _note(self, member: _Member, problem: str, said: Mapping[str, Any] | None = None) -> None:
        """Take down that a rank is lost; of several, which may follow from each other, the first one counts."""
        with self._lock:
            if self._is_closing or self._lost is not None:
                return
            kind = getattr(errors, str((said or {}).get("kind")), RankLost)
            if isinstance(kind, type) and issubclass(kind, UserError):
                self._lost = kind(f"{problem} (rank {member.rank} of {self.ranks})")
            else:
                self._lost = RankLost(
                    f"expected {self.ranks} ranks that train together, got: rank {member.rank} {problem}; "
                    "all of them begin anew from the newest checkpoint"
                )
            lost = self._lost
        self._is_lost.set()
        log.error("a rank is lost", rank=member.rank, problem=str(lost))
        for each in self._members:
            each.answers.put(None)
        threading.Thread(target=self._end_unless_told, args=(lost,), name="lost-rank", daemon=True).start()

    def _end_unless_told(self, lost: StreamRLError) -> None:
        if self._is_told.wait(self._grace_s) or self._is_closing:
            return
        sys.stderr.write(f"error: {lost}\n")
        sys.stderr.flush()
        self._end_process(lost.exit_code)
