"""The process of a rank other than 0: carries out rank 0's messages, one at a time, until rank 0 is gone.

Rank 0 (``team.py``) starts it with one end of a pair of sockets. It opens no topic and no store; it writes its part of
a checkpoint into the directory that rank 0 names. It ignores SIGINT and SIGTERM, which a terminal or a service manager
sends to the whole process group: rank 0 still needs this rank for its last checkpoint.
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
from streamrl.consumers.training.ranks.wire import RankMessage, Wire
from streamrl.consumers.training.settings import TrainingSettings
from streamrl.schemas.errors import StreamRLError

FAILURE_REPORT_DELAY_S = 2.0
"""Seconds before an unexpected failure is reported: if another rank's loss caused it, that loss is reported first."""


def serve(end: socket.socket) -> NoReturn:
    """Work as a rank until rank 0 closes its end; then this process ends, even if it waits for something else."""
    for number in (signal.SIGINT, signal.SIGTERM):
        signal.signal(number, signal.SIG_IGN)
    wire, messages = Wire(end), queue.SimpleQueue[RankMessage]()
    threading.Thread(target=_receive, args=(wire, messages), daemon=True).start()
    try:
        learner = _open(wire, messages.get())
        while True:
            if (answer := carry_out(learner, messages.get())) is not None:
                wire.send(answer)
    except StreamRLError as error:
        wire.send(RankMessage(FAILED, {"kind": type(error).__name__, "problem": str(error)}))
    except BaseException as error:
        traceback.print_exc()
        time.sleep(FAILURE_REPORT_DELAY_S)
        wire.send(RankMessage(FAILED, {"problem": f"failed: {type(error).__name__}: {error}"}))
    finally:
        sys.stderr.flush()
        os._exit(1)


def _receive(wire: Wire, messages: "queue.SimpleQueue[RankMessage]") -> None:
    while (message := wire.receive()) is not None:
        messages.put(message)
    os._exit(0)  # even if the main thread waits for rank 0 in a collective operation


def _open(wire: Wire, message: RankMessage) -> ShardLearner:
    values = message.values
    plan = plan_of(values)
    torch.set_num_threads(threads_of(plan.training))
    device = rank_device(plan.training, values["rank"])
    wire.send(RankMessage("ready"))
    store = TCPStore(HOST, values["port"], is_master=False)
    learner = open_learner(plan, join_ranks(store, values["rank"], values["ranks"], device))
    wire.send(RankMessage("opened"))
    return learner


def threads_of(training: TrainingSettings) -> int:
    """CPU threads of one operation: the setting, or this rank's share of the processors."""
    return training.threads or max(1, (os.cpu_count() or 1) // training.ranks)


if __name__ == "__main__":
    serve(socket.socket(fileno=int(sys.argv[1])))
