"""A zygote: a process that has imported torch and the model's code, and forks ranks.

Tests need it because torch does not let a forked process compute gradients if its parent has computed one.
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
    """The part of ``subprocess.Popen`` that a team needs. The process that forked the rank reaps it."""

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
    """The process's start time from ``/proc``; None if the process is gone or a zombie."""
    try:
        fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    except (FileNotFoundError, ProcessLookupError):
        return None
    return None if fields[0] in "ZX" else fields[19]


def fork_rank(end: socket.socket, instead: Callable[[socket.socket], None] | None = None) -> ForkedRank:
    """Fork a rank from this process, which must not have computed a gradient. It calls ``instead`` if that is given."""
    pid = os.fork()
    if pid == 0:
        try:
            os.environ[RANK_VARIABLE] = "1"
            gc.freeze()  # else collecting a socket of the parent here would close a descriptor that is in use
            number = os.dup(end.fileno())
            # Also close the ends of other ranks' sockets, so that their peers notice when they are closed.
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
    """The zygote, as the test process sees it."""

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
        self.process.wait(120.0)  # unloading torch takes long while other tests run

    def start(self, end: socket.socket, act: str = "", nth: int = 0, *, lead: Sequence[str] = ()) -> ForkedRank:
        """Start a rank that serves this end. ``act``: what it does at the ``nth`` forward pass.

        ``lead``: a directory and a model; the process then runs the function ``lead`` as rank 0.
        """
        job = {"act": act, "nth": nth, "lead": list(lead)}
        socket.send_fds(self.wire, [json.dumps(job).encode()], [end.fileno()])
        STARTED.append(ForkedRank(int(self.wire.recv(64))))
        return STARTED[-1]


def lead(root: str, model: str, end: socket.socket) -> None:
    """Run rank 0 of two. It leaves rank 1 in a collective operation, and sends the pid of rank 1."""
    from tests.consumers.training.ranks.team import open_ranked

    policy = open_ranked(Path(root), Path(model), 2, start=fork_rank)
    policy._team.tell("weights", dtype="float32")
    end.sendall(b"%d\n" % STARTED[-1].pid)
    time.sleep(60)


def act_at(act: str, nth: int, end: socket.socket) -> None:
    """Serve as a rank that does ``act`` at the ``nth`` forward pass."""
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
    """Fork ranks until the other end is gone."""
    import importlib

    for module in ("streamrl.consumers.training.ranks.member", "transformers.models.qwen2.modeling_qwen2"):
        importlib.import_module(module)
    signal.signal(signal.SIGCHLD, signal.SIG_IGN)  # no process waits for a rank's exit code
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
