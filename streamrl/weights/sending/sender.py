"""The weight sender: puts versions straight into the processes of vLLM engines, where links are faster than files.

The sender reads the trainer's store, which relays serve as well. When a version is announced, a worker requests a turn
while its engine samples on. The answer says how the engine's ranks join the sender's process group and which tensors
come. Then the sender broadcasts the tensors over that group, which lasts from one version to the next. Announcements
and the order of adoption are the same as with files. A worker that the sender does not serve fetches files.

Invariants:
- only_announced_weights_are_sent: the manifest has the announced sha256, and the file has the manifest's;
- one_engine_is_sent_to_at_a_time: two collectives on one device may wait for each other;
- a_failed_turn_ends_its_session: the engine of a failed turn is lost, and its successor joins a new group.
"""

import asyncio
import functools
import threading
from collections.abc import Callable, Mapping
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

import structlog
from aiohttp import web
from pydantic import ValidationError

from streamrl.bus.serving import listen
from streamrl.bus.waiting import end_tasks, in_thread
from streamrl.schemas.errors import UserError, WeightsError
from streamrl.schemas.files import sha256_of
from streamrl.schemas.identifiers import PolicyVersion
from streamrl.schemas.weights import MANIFEST, WEIGHTS, checked_manifest
from streamrl.weights.sending.settings import SenderSettings
from streamrl.weights.turns import MAX_REQUEST_BYTES, SendingTurn, TurnRequest

if TYPE_CHECKING:
    from streamrl.weights.groups import SendingGroup

log = structlog.get_logger()

TIMEOUT_S = 60.0
"""Longest wait in seconds for a turn, an engine's processes, or one tensor."""
STUCK_AFTER = 3.0
"""Multiple of the timeout: connecting may take the whole timeout, and so may each tensor."""
MOST_SESSIONS = 1024
"""Most engines with a group. Beyond that, the engine served longest ago loses its group and has to join again."""


@dataclass(frozen=True)
class LoadedVersion:
    """A checked version, its tensors (torch's) mapped into memory. ``sums``: ``word_sum`` of each."""

    manifest_sha256: str
    tensors: Mapping[str, Any]
    sums: tuple[int, ...]


@dataclass
class WeightSender:
    """Serves ``POST /turns`` and ``GET /health``. ``open_group`` opens a group for a number of ranks."""

    store: Path
    settings: SenderSettings
    open_group: Callable[[int], "SendingGroup"]
    timeout_s: float = TIMEOUT_S
    _sessions: "dict[str, SendingGroup]" = field(default_factory=dict)
    _loaded: tuple[PolicyVersion, LoadedVersion] | None = None
    _turn: asyncio.Lock = field(default_factory=asyncio.Lock)
    _stuck: asyncio.Event = field(default_factory=asyncio.Event)
    _sending: set[asyncio.Task[None]] = field(default_factory=set)

    async def run(self, stop: asyncio.Event) -> None:
        """Send until stopped.

        Consumes: workers' requests for turns, over HTTP. Produces: tensors, to the ranks of their engines.
        Waits for: requests; before each turn, the end of the one before.
        On failure: a failed turn ends its session. A stuck collective cannot be interrupted, so it ends this process
            with ``WeightsError``. A taken port raises ``UserError``.
        On stop: leaves the groups; a worker in the middle of a turn loses its engine, and restarts it from files.
        """
        runner = web.AppRunner(self.application(), access_log=None, shutdown_timeout=2.0)
        await runner.setup()
        try:
            try:
                await listen(runner, self.settings.host, self.settings.port)
            except OSError as error:
                raise UserError(
                    f"expected a free port for the weight sender, got {self.settings.host}:{self.settings.port} in use "
                    f"({error.strerror}); choose another with --sender.port"
                ) from error
            log.info("weight sender ready", address=runner.addresses)
            stopped, stuck = asyncio.ensure_future(stop.wait()), asyncio.ensure_future(self._stuck.wait())
            await asyncio.wait({stopped, stuck}, return_when=asyncio.FIRST_COMPLETED)
            stopped.cancel()
            stuck.cancel()
        finally:
            await runner.cleanup()
            await end_tasks(self._sending)
        if self._stuck.is_set():
            raise WeightsError(
                f"expected to send weights within {self.timeout_s:g} s, but sending hangs; "
                "this process restarts, and workers fetch files until then"
            )
        for group in self._sessions.values():
            group.close()

    def application(self) -> web.Application:
        """The routes."""
        app = web.Application(client_max_size=MAX_REQUEST_BYTES)
        app.router.add_get("/health", self._health)
        app.router.add_post("/turns", self._take_turn)
        return app

    async def _health(self, _request: web.Request) -> web.Response:
        return web.json_response({"status": "ok"})

    async def _take_turn(self, request: web.Request) -> web.Response:
        try:
            wanted = TurnRequest.model_validate_json(await request.read())
        except ValidationError as error:
            raise web.HTTPBadRequest(text=f"expected a request for a turn, got: {error.errors()[0]['msg']}\n") from None
        try:
            async with asyncio.timeout(self.timeout_s):
                await self._turn.acquire()
        except TimeoutError:
            raise web.HTTPServiceUnavailable(text="the sender is busy with other engines; fetch files\n") from None
        try:
            if request.transport is None or request.transport.is_closing():
                raise web.HTTPServiceUnavailable(text="the requester has closed its connection\n")
            loaded = await self._load(wanted)
            is_new = wanted.session not in self._sessions
            group = self._sessions.pop(wanted.session) if not is_new else self.open_group(wanted.ranks)
        except BaseException:
            self._turn.release()
            raise
        # `_send` puts the session back at the end: the first session is the one served longest ago.
        task = asyncio.create_task(self._send(wanted, group, loaded))
        self._sending.add(task)
        task.add_done_callback(self._sending.discard)
        answer = SendingTurn(meeting=dict(group.meeting) if is_new else {}, sums=loaded.sums, **listed(loaded.tensors))
        return web.Response(body=answer.model_dump_json().encode(), content_type="application/json")

    async def _load(self, wanted: TurnRequest) -> LoadedVersion:
        """A version of the store, checked when first loaded. Releases the version loaded before.

        Raises:
            HTTPException: the version is missing, or differs from the announced one.
        """
        if self._loaded is None or self._loaded[0] != wanted.version:
            try:
                loaded = await in_thread(load_version, self.store / str(wanted.version), wanted)
            except FileNotFoundError:
                raise web.HTTPGone(text=f"version {wanted.version} is not in the store (any more)\n") from None
            except WeightsError as error:
                raise web.HTTPConflict(text=f"{error}\n") from None
            self._loaded = wanted.version, loaded
        loaded = self._loaded[1]
        if loaded.manifest_sha256 != wanted.manifest_sha256:
            raise web.HTTPConflict(text=f"version {wanted.version} has a manifest with another sha256\n")
        return loaded

    async def _send(self, wanted: TurnRequest, group: "SendingGroup", loaded: LoadedVersion) -> None:
        started_at = asyncio.get_running_loop().time()
        sending = _in_thread(functools.partial(group.send, loaded.tensors))
        try:
            # The group's own timeout ends every wait that can be interrupted; beyond it, the collective is stuck.
            if not (await asyncio.wait({sending}, timeout=STUCK_AFTER * self.timeout_s))[0]:
                self._stuck.set()
                return
            sending.result()
        except Exception as error:
            log.warning("weights not sent", version=str(wanted.version), session=wanted.session, error=str(error))
            group.close()
        else:
            self._sessions[wanted.session] = group
            while len(self._sessions) > MOST_SESSIONS:
                self._sessions.pop(next(iter(self._sessions))).close()
            took_s = round(asyncio.get_running_loop().time() - started_at, 3)
            log.info("weights sent", version=str(wanted.version), ranks=wanted.ranks, seconds=took_s)
        finally:
            if not self._stuck.is_set():
                self._turn.release()


def listed(tensors: Mapping[str, Any]) -> dict[str, Any]:
    """The fields of a ``SendingTurn`` that describe tensors."""
    return {
        "names": tuple(tensors),
        "dtype_names": tuple(str(tensor.dtype).removeprefix("torch.") for tensor in tensors.values()),
        "shapes": tuple(tuple(tensor.shape) for tensor in tensors.values()),
    }


def load_version(directory: Path, asked: TurnRequest) -> LoadedVersion:
    """Check and map the weights of a version's directory. Blocks while it reads them.

    Raises:
        FileNotFoundError: there is no such version.
        WeightsError: it is not the requested version, or it has an adapter only.
    """
    from streamrl.weights.groups import word_sum
    from streamrl.weights.tensors import map_tensors

    manifest = checked_manifest(
        (directory / MANIFEST).read_bytes(), asked.version, asked.manifest_sha256, directory.name
    )
    file = next((file for file in manifest.files if file.name == WEIGHTS), None)
    if file is None:
        raise WeightsError(f"expected {WEIGHTS} in {asked.version}, got none: adapters are fetched as files")
    path = directory / WEIGHTS
    if (found := sha256_of(path)) != file.sha256:
        raise WeightsError(f"expected sha256 {file.sha256} of {WEIGHTS} in {asked.version}, got {found}")
    tensors = map_tensors(path)
    return LoadedVersion(asked.manifest_sha256, tensors, tuple(word_sum(tensor) for tensor in tensors.values()))


def _in_thread(call: Callable[[], None]) -> "asyncio.Future[None]":
    """Run ``call`` in a daemon thread, since a collective may never return and must not delay the process's exit."""
    loop = asyncio.get_running_loop()
    ended: asyncio.Future[None] = loop.create_future()

    def settle(error: BaseException | None) -> None:
        if ended.done():  # it was cancelled
            return
        if error is None:
            ended.set_result(None)
        else:
            ended.set_exception(error)

    def run() -> None:
        error: BaseException | None = None
        try:
            call()
        except BaseException as raised:  # is raised again in the caller
            error = raised
        with suppress(RuntimeError):  # the loop has ended
            loop.call_soon_threadsafe(settle, error)

    threading.Thread(target=run, name="send-weights", daemon=True).start()
    return ended
