"""A process that has torch and the model's code in memory, and forks ranks.

For a process that has taken a gradient, whose forks may not take one: torch forbids it.
"""

import gc
import json
import os
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cache, partial
from pathlib import Path
from typing import Any

from tests.chaos.crashing.points import RANK_VARIABLE


class ForkedRank:
    """As much of ``subprocess.Popen`` as a team needs; it is reaped by whoever forked it."""

    def __init__(self, pid: int) -> None:
        self.pid = pid
        self._started = started_of(pid)

    def wait(self, timeout: float | None = None) -> int:
        deadline = time.monotonic() + (timeout or 0.0)
        while self._started is not None and started_of(self.pid) == self._started:
            if time.monotonic() > deadline:
                raise subprocess.TimeoutExpired("a rank", timeout or 0.0)
            time.sleep(0.01)
        return 0

    def kill(self) -> None:
        os.kill(self.pid, signal.SIGKILL)


STARTED: list[ForkedRank] = []


def started_of(pid: int) -> str | None:
    """When it started, as the system tells it; None once it only waits to be reaped, or is gone."""
    try:
        fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    except (FileNotFoundError, ProcessLookupError):
        return None
    return None if fields[0] in "ZX" else fields[19]


def fork_rank(end: socket.socket, instead: Callable[[socket.socket], None] | None = None) -> ForkedRank:
    """A rank forked from this process, which has taken no gradient yet; ``instead`` of serving as one, it does that."""
    pid = os.fork()
    if pid == 0:
        try:
            os.environ[RANK_VARIABLE] = "1"
            gc.freeze()  # a socket of the parent's that is collected here would close the number of one of ours
            number = os.dup(end.fileno())
            # The ends of other ranks' sockets among them, whose closing is to be seen.
            os.closerange(3, number)
            os.closerange(number + 1, 4096)
            from streamrl.consumers.training.ranks.member import serve

            (instead or serve)(socket.socket(fileno=number))
        finally:
            os._exit(1)
    STARTED.append(ForkedRank(pid))
    return STARTED[-1]


@dataclass(frozen=True)
class Zygote:
    """The other process."""

    wire: socket.socket
    process: "subprocess.Popen[bytes]"

    @classmethod
    @cache
    def started(cls) -> "Zygote":
        ours, theirs = socket.socketpair()
        with theirs:
            command = [sys.executable, "-m", "tests.consumers.training.ranks.zygote", str(theirs.fileno())]
            environment = os.environ | {"OMP_NUM_THREADS": "1"}
            process = subprocess.Popen(command, pass_fds=[theirs.fileno()], env=environment)
        return cls(ours, process)

    def close(self) -> None:
        self.wire.close()
        self.process.wait(120.0)  # it has torch to take down, beside other tests

    def start(self, end: socket.socket, act: str = "", nth: int = 0, *, lead: Sequence[str] = ()) -> ForkedRank:
        """A rank that serves this end; ``act`` is what it does at its nth forward pass of a gradient.

        ``lead``: a directory and a model, of which it is rank 0 instead; see there.
        """
        job = {"act": act, "nth": nth, "lead": list(lead)}
        socket.send_fds(self.wire, [json.dumps(job).encode()], [end.fileno()])
        STARTED.append(ForkedRank(int(self.wire.recv(64))))
        return STARTED[-1]


def lead(root: str, model: str, end: socket.socket) -> None:
    """Rank 0 of two, which leaves the other one in a collective operation, and tells its pid."""
    from tests.consumers.training.ranks.team import open_ranked

    policy = open_ranked(Path(root), Path(model), 2, start=fork_rank)
    policy._team.tell("weights", dtype="float32")
    end.sendall(b"%d\n" % STARTED[-1].pid)
    time.sleep(60)


def act_at(act: str, nth: int, end: socket.socket) -> None:
    """Be a rank that does it."""
    from streamrl.consumers.training.ranks.member import serve
    from streamrl.consumers.training.step import PolicyLearner

    plain, passes = PolicyLearner._forward, [0]

    def forward(learner: PolicyLearner, *inputs: Any) -> Any:
        passes[0] += 1
        if passes[0] == nth and act == "die":
            os.kill(os.getpid(), signal.SIGKILL)
        if passes[0] == nth and act == "run out of memory":
            raise MemoryError("out of memory: tried to allocate")
        return plain(learner, *inputs)

    PolicyLearner._forward = forward  # type: ignore[assignment, method-assign]
    serve(end)


def serve_forks(wire: socket.socket) -> None:
    """Until the other end is gone."""
    import importlib

    for module in ("streamrl.consumers.training.ranks.member", "transformers.models.qwen2.modeling_qwen2"):
        importlib.import_module(module)
    signal.signal(signal.SIGCHLD, signal.SIG_IGN)  # nobody waits for a rank's exit code
    while True:
        data, descriptors, _, _ = socket.recv_fds(wire, 4096, 1)
        if not data:
            return
        job = json.loads(data)
        with socket.socket(fileno=descriptors[0]) as end:
            instead = partial(act_at, job["act"], job["nth"]) if job["act"] else None
            rank = fork_rank(end, partial(lead, *job["lead"]) if job["lead"] else instead)
        wire.sendall(b"%d" % rank.pid)


if __name__ == "__main__":
    serve_forks(socket.socket(fileno=int(sys.argv[1])))
