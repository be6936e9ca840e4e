"""Starts processes as forks of one process that has already imported their libraries.

A new interpreter takes five seconds of a processor to import torch and transformers, and a run starts half a dozen.
``ForkServer`` starts one process that imports them once (``python -m streamrl.deploy.local.forking MODULE...``). It
forks itself at each request, and the fork runs the command's module. It is not the fork server of multiprocessing,
which runs the user's main module again in each process, and gives all of them one environment.

Invariants:
- a_fork_server_has_one_thread: a lock that another thread holds during a fork would never be released in the fork. So
  the server starts no thread, and the pools of its libraries have one thread each. It initialises no device;
- a_forked_process_is_like_a_new_one: it has its own session, environment, standard streams, command line and numbers
  of threads; signals and exit codes mean the same;
- a_fork_server_takes_its_processes_along: the kernel kills them when it ends, and ends it with its owner.
"""

import asyncio
import gc
import importlib
import json
import os
import runpy
import select
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Mapping, Sequence
from contextlib import closing, suppress
from dataclasses import dataclass
from typing import TYPE_CHECKING, Protocol, Self

from streamrl.bus.embedded.process import die_with_parent
from streamrl.schemas.command_line import change_shown_command_line
from streamrl.schemas.import_path import module_command

if TYPE_CHECKING:
    from streamrl.settings.placement import Machine
    from streamrl.settings.tree import Settings

BASE = (
    "streamrl.cli.app",
    "streamrl.settings.loading",
    "streamrl.deploy.wiring.build",
    "streamrl.deploy.wiring.process",
    "streamrl.coordinator.coordinator",
    "streamrl.producers.dispatch.dispatcher",
    "streamrl.producers.prompts.sources",
    "streamrl.producers.lengths.startup",
    "streamrl.weights.relay.server",
)
"""What all processes of a run have in common; no library for models."""
MODELS = (
    "streamrl.deploy.local.task_check",
    "streamrl.deploy.wiring.trainer",
    "streamrl.consumers.training.policy",
    "streamrl.producers.generation.engines.slots",
    "streamrl.producers.generation.worker",
    "streamrl.producers.rewards.runner",
    "transformers.models.auto.modeling_auto",
    "transformers.models.auto.tokenization_auto",
)
"""What trainers, workers, the check of the task and evaluations of models have in common besides."""
MODULE = "streamrl.deploy.local.forking"
ONE_THREAD = dict.fromkeys(("OMP_NUM_THREADS", "MKL_NUM_THREADS", "OPENBLAS_NUM_THREADS"), "1")
_SHOWN = " " * 2048
"""Room for the command lines of the forks: Linux shows the memory of the arguments that the server started with."""
_FORK = b"fork"
_FILES = 5
"""Files of a request: the request itself, standard input, output and error, and the pipe for id and exit code."""


class HasFile(Protocol):
    """A file or a socket."""

    def fileno(self) -> int:
        """Its descriptor."""
        ...


Streams = Sequence[HasFile | None]
"""Standard input, output and error; None: nothing."""


class ForkServer:
    """A process that has imported ``modules``, and forks at request. It starts with ``open``, or with the first fork.

    If it was killed, the next request starts another one. Use it as a context manager or call ``close``. Not
    thread-safe. ``parent``: the server that it is a fork of; it then has that one's modules, too.
    """

    def __init__(self, modules: Sequence[str], parent: "ForkServer | None" = None) -> None:
        self._modules = modules
        self._parent = parent
        self._requests: socket.socket | None = None
        self._process: subprocess.Popen[bytes] | None = None
        self._report = -1

    def open(self) -> None:
        """Start the server unless it runs; returns at once, before it has imported anything."""
        if self._requests is not None:
            return
        command = [*module_command(MODULE, *self._modules), _SHOWN]
        # Packets: each request is one message.
        self._requests, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        try:
            with theirs:
                self._launch(command, theirs)
        except BaseException:
            self.close()
            raise

    def _launch(self, command: Sequence[str], theirs: socket.socket) -> None:
        if self._parent is not None:
            self._report = self._parent.request(command, os.environ | ONE_THREAD, (theirs, None, None))
            return
        self._process = subprocess.Popen(
            command,
            stdin=theirs.fileno(),
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
            env=os.environ | ONE_THREAD,
            start_new_session=True,
            preexec_fn=die_with_parent,
        )

    def close(self) -> None:
        """End the server, and all processes that it has forked. Idempotent.

        A server with a parent ends when it has imported its modules, or with its parent.
        """
        if self._requests is not None:
            self._requests.close()
        if self._process is not None:
            self._process.kill()
            self._process.wait()
        if self._report >= 0:
            os.close(self._report)
        self._requests, self._process, self._report = None, None, -1

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    async def start(self, command: Sequence[str], environment: Mapping[str, str], output: HasFile) -> "ForkedProcess":
        """Start a command of ``module_command``; waits until the server has imported everything.

        Raises:
            OSError: the server cannot be started, or ended.
        """
        report, pipe = await _reader_of(self.request(command, environment, (None, output, output)))
        if not (pid := await report.readline()):
            pipe.close()
            raise ConnectionError("the process that forks others has ended")
        return ForkedProcess(int(pid), report, pipe)

    def run(
        self,
        command: Sequence[str],
        environment: Mapping[str, str],
        streams: Streams,
        timeout_s: float,
    ) -> int:
        """Run a command of ``module_command``; returns its exit code. ``streams``: standard input, output and error.

        At any failure the server is closed, and with it the process.

        Raises:
            TimeoutError: the process still runs after ``timeout_s`` seconds.
            OSError: the server cannot be started, or ended.
        """
        deadline = time.monotonic() + timeout_s
        try:
            with os.fdopen(self.request(command, environment, streams), "rb", buffering=0) as report:
                numbers = b""
                while numbers.count(b"\n") < 2:
                    if not select.select([report], [], [], max(0.0, deadline - time.monotonic()))[0]:
                        raise TimeoutError(f"the process still runs after {timeout_s:g} s")
                    if not (more := report.read(64)):
                        raise ConnectionError("the process that forks others has ended")
                    numbers += more
        except BaseException:
            self.close()
            raise
        return int(numbers.split()[1])

    def request(self, command: Sequence[str], environment: Mapping[str, str], streams: Streams) -> int:
        """Ask for a process; returns the end of a pipe for its id and, later, its exit code, each on a line.

        Raises:
            OSError: the server cannot be started.
        """
        *interpreter, _ = module_command("")
        assert [*command[: len(interpreter)]] == interpreter, "a command of ``module_command``"
        module, *arguments = command[len(interpreter) :]
        reading, writing = os.pipe()
        try:
            # In a file without a name, because an environment may be larger than a packet.
            with os.fdopen(os.memfd_create("request"), "wb") as request, open(os.devnull, "r+b") as nothing:
                request.write(json.dumps([module, arguments, {**environment}]).encode())
                request.flush()
                self._send([request.fileno(), *((each or nothing).fileno() for each in streams), writing])
        except BaseException:
            os.close(reading)
            raise
        finally:
            os.close(writing)
        return reading

    def _send(self, files: Sequence[int]) -> None:
        for is_last in (False, True):
            self.open()
            assert self._requests is not None
            try:
                socket.send_fds(self._requests, [_FORK], files)
                return
            except ConnectionError:  # it was killed a moment ago
                self.close()
                if is_last:
                    raise


class ForkedProcess:
    """A process of a fork server, with what a supervisor needs of ``asyncio.subprocess.Process``.

    ``returncode``: None while it runs; -SIGKILL if its server has ended, because the kernel then kills it.
    """

    def __init__(self, pid: int, report: asyncio.StreamReader, pipe: asyncio.ReadTransport) -> None:
        self.pid = pid
        self.returncode: int | None = None
        self._ending = asyncio.create_task(self._wait(report, pipe))

    async def wait(self) -> int:
        """Wait for its end; returns the exit code, or -N after signal N."""
        return await asyncio.shield(self._ending)

    async def _wait(self, report: asyncio.StreamReader, pipe: asyncio.ReadTransport) -> int:
        with closing(pipe):
            line = await report.readline()
        self.returncode = int(line) if line else -signal.SIGKILL
        return self.returncode


class Forks:
    """The fork servers of a run: ``base`` for all processes, and ``models`` for those that load a model.

    Use it as a context manager. ``base`` starts at once, and ``models`` is the same one until ``load_models``.
    """

    def __init__(self) -> None:
        self.base = self.models = ForkServer(BASE)
        self.base.open()

    def load_models(self, settings: "Settings", machine: "Machine") -> None:
        """Start to import the libraries for models, if the run needs them; does nothing the second time.

        A process that may use CUDA imports them itself: what a library does with a device must not be inherited.
        """
        is_emulated = settings.generation.engine == "emulated" and settings.training.backend == "emulated"
        if self.models is self.base and not machine.devices and not is_emulated:
            self.models = ForkServer(MODELS, self.base)
            self.models.open()

    def of_roles(self, settings: "Settings") -> "dict[str, ForkServer]":
        """The server of each role that does not use ``base``."""
        # vLLM decides for itself how it starts its processes, and which libraries it imports first.
        workers = self.base if settings.generation.engine == "vllm" else self.models
        return {"trainer": self.models, "worker": workers}

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        if self.models is not self.base:
            self.models.close()
        self.base.close()


async def _reader_of(file: int) -> tuple[asyncio.StreamReader, asyncio.ReadTransport]:
    """Reads the pipe until the transport is closed."""
    reader = asyncio.StreamReader()
    protocol = asyncio.StreamReaderProtocol(reader)
    loop = asyncio.get_running_loop()
    pipe, _ = await loop.connect_read_pipe(lambda: protocol, os.fdopen(file, "rb", buffering=0))
    return reader, pipe


# --- In the server --------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class _Request:
    """The module to run as the main module, its arguments, and the whole environment."""

    module: str
    arguments: Sequence[str]
    environment: Mapping[str, str]


def main() -> None:
    """The server and, after a fork, the process that was asked for."""
    modules, requests = sys.argv[1:-1], socket.socket(fileno=os.dup(0))
    change_shown_command_line(lambda line: line.replace(_SHOWN.encode(), b""))
    gc.disable()  # nothing that an import makes is garbage
    for module in modules:
        # A process that needs the module imports it again, and reports the error.
        with suppress(Exception):
            importlib.import_module(module)
    gc.freeze()  # a collection in a fork would copy the memory of all these objects
    gc.enable()
    if (request := _serve(requests)) is None:
        os._exit(0)  # at once: it has nothing to clean up
    sys.argv[1:] = request.arguments
    runpy.run_module(request.module, run_name="__main__", alter_sys=True)


def _serve(requests: socket.socket) -> _Request | None:
    """Fork at each request. Returns the request in the fork, and None in the server when its owner has closed it."""
    running: dict[int, tuple[int, int]] = {}  # by the descriptor of a process: its id, and where its exit is reported
    waiting = select.poll()
    waiting.register(requests, select.POLLIN)
    while True:
        for file, _ in waiting.poll():
            if file != requests.fileno():
                waiting.unregister(file)
                _report_exit(file, *running.pop(file))
                continue
            packet, files, *_ = socket.recv_fds(requests, len(_FORK), _FILES)
            if not packet:
                return None
            given, *streams, report = files
            server = os.getpid()
            if not (pid := os.fork()):
                for each in (*running, *(end for _, end in running.values()), report):
                    os.close(each)
                requests.close()
                return _become_new(given, streams, server)
            process = os.pidfd_open(pid)
            running[process] = pid, report
            waiting.register(process, select.POLLIN)
            _write(report, pid)
            for each in (given, *streams):
                os.close(each)


def _report_exit(process: int, pid: int, report: int) -> None:
    _write(report, os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]))
    os.close(process)
    os.close(report)


def _write(report: int, number: int) -> None:
    with suppress(OSError):  # nobody waits for it any more
        os.write(report, f"{number}\n".encode())


def _become_new(given: int, streams: Sequence[int], server: int) -> _Request:
    """Make this fork like a process with a new interpreter."""
    os.setsid()
    die_with_parent()
    if os.getppid() != server:  # it ended before the kernel watched it
        os._exit(128 + signal.SIGKILL)
    for number, file in enumerate(streams):
        os.dup2(file, number)
        os.close(file)
    with os.fdopen(given, "rb") as written:
        written.seek(0)
        request = _Request(*json.load(written))
    os.environ.clear()
    os.environ.update(request.environment)
    shown = module_command(request.module, *request.arguments)
    change_shown_command_line(lambda _: b"".join(os.fsencode(each) + b"\0" for each in shown))
    _separate_libraries()
    return request


def _separate_libraries() -> None:
    """Do in a fork what libraries do once, when they are imported: count the threads to use, and draw a seed."""
    if (torch := sys.modules.get("torch")) is not None:
        given = os.environ.get("OMP_NUM_THREADS", "").partition(",")[0]
        torch.set_num_threads(int(given) if given.isdigit() and int(given) else len(os.sched_getaffinity(0)))
    if (numpy := sys.modules.get("numpy")) is not None:
        numpy.random.seed()


if __name__ == "__main__":
    main()
