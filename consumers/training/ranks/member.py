"""The process of a rank other than 0: does what rank 0 tells it, one thing after the other, until rank 0 is gone.

Started by rank 0 (``team.py``) with its end of a pair of sockets. It opens no topic and no store of its own; it writes
its part of a checkpoint where it is told to. SIGINT and SIGTERM, which a terminal or a service manager sends to all of
a group, are rank 0's to decide about: it still needs this rank for its last checkpoint.
"""

import os
import queue
import signal
import socket
import sys
import threading
import time
import traceback
from typing import NoReturn

import torch
from torch._C._distributed_c10d import TCPStore

from streamrl.consumers.training.ranks.learner import ShardLearner, carry_out, open_learner, plan_of
from streamrl.consumers.training.ranks.sharding import HOST, join_ranks, rank_device
from streamrl.consumers.training.ranks.team import FAILED
from streamrl.consumers.training.ranks.wire import Told, Wire
from streamrl.consumers.training.settings import TrainingSettings
from streamrl.schemas.errors import StreamRLError

FOLLOWS_S = 2.0
"""Waited before an unexpected failure is told: what follows from the loss of another rank is told after that loss."""


def serve(end: socket.socket) -> NoReturn:
    """Be a rank until the other end is gone; this process ends then, whatever else it waits for."""
    for number in (signal.SIGINT, signal.SIGTERM):
        signal.signal(number, signal.SIG_IGN)
    wire, told = Wire(end), queue.SimpleQueue[Told]()
    threading.Thread(target=_receive, args=(wire, told), daemon=True).start()
    try:
        learner = _opened(wire, told.get())
        while True:
            if (answer := carry_out(learner, told.get())) is not None:
                wire.send(answer)
    except StreamRLError as error:
        wire.send(Told(FAILED, {"kind": type(error).__name__, "problem": str(error)}))
    except BaseException as error:
        traceback.print_exc()
        time.sleep(FOLLOWS_S)
        wire.send(Told(FAILED, {"problem": f"failed: {type(error).__name__}: {error}"}))
    finally:
        sys.stderr.flush()
        os._exit(1)


def _receive(wire: Wire, told: "queue.SimpleQueue[Told]") -> None:
    while (message := wire.receive()) is not None:
        told.put(message)
    os._exit(0)  # also out of a collective operation, in which the main thread may wait for rank 0


def _opened(wire: Wire, told: Told) -> ShardLearner:
    values = told.values
    plan = plan_of(values)
    torch.set_num_threads(threads_of(plan.training))
    device = rank_device(plan.training, values["rank"])
    wire.send(Told("ready"))
    store = TCPStore(HOST, values["port"], is_master=False)
    learner = open_learner(plan, join_ranks(store, values["rank"], values["ranks"], device))
    wire.send(Told("opened"))
    return learner


def threads_of(training: TrainingSettings) -> int:
    """CPU threads of one operation: as set, or this rank's share of the processors."""
    return training.threads or max(1, (os.cpu_count() or 1) // training.ranks)


if __name__ == "__main__":
    serve(socket.socket(fileno=int(sys.argv[1])))
