"""The relay: weight versions over HTTP with Range, from a store directory. It only reads; no trainer waits for it.

Invariant only_complete_versions_are_served: a version's files are visible once its manifest is, which is written last.
"""

import asyncio
import re
import socket
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import structlog
from aiohttp import web

from coordinator.settings import RelaySettings
from schemas.errors import UserError
from schemas.identifiers import PolicyVersion
from schemas.weights import MANIFEST, complete_versions

log = structlog.get_logger()

# A plain name of a kind that a model directory has: no path, no hidden file.
_NAME = re.compile(r"[A-Za-z0-9_-][A-Za-z0-9._-]{0,127}\.(safetensors|json|jinja|txt|model|delta)")


@dataclass(frozen=True)
class WeightsStore:
    """A directory with one sub-directory per version, named ``<lineage>-<number>``."""

    root: Path

    def find(self, version: str, name: str) -> Path | None:
        """The file to serve, or none if version or name is not plain, not complete, a link, or not there."""
        try:
            # Parsed and written anew: two numbers and a dash are all that gets from the URL into the path.
            directory = self.root / str(PolicyVersion.parse(version))
        except ValueError:
            return None
        if _NAME.fullmatch(name) is None or not (directory / MANIFEST).is_file():
            return None
        path = directory / name
        inside = path.resolve().is_relative_to(self.root.resolve())
        return path if inside and path.is_file() and not path.is_symlink() and not directory.is_symlink() else None

    def is_gone(self, version: str) -> bool:
        """Whether a version is not there, and newer ones are: it was deleted and will not come back."""
        try:
            wanted = PolicyVersion.parse(version)
        except ValueError:
            return False
        there = self.versions()
        return wanted not in there and bool(there) and wanted < there[-1]

    def versions(self) -> list[PolicyVersion]:
        """Complete versions, oldest first."""
        return complete_versions(self.root)


@dataclass
class Relay:
    """``GET /weights``, ``GET /weights/{version}/{file}`` and ``GET /health``.

    ``on_response`` is called when an answer begins, with its status and the bytes of weights that it is to carry.
    """

    store: WeightsStore
    settings: RelaySettings
    on_response: Callable[[int, int], None] = lambda status, weight_bytes: None

    async def run(self, stop: asyncio.Event) -> None:
        """Serve until stopped.

        Consumes: HTTP requests. Produces: files of the store.
        Waits for: requests.
        On failure: an unknown file is a 404, of a version deleted meanwhile a 410; a taken port raises ``UserError``.
        On stop: closes its connections within two seconds.
        """
        self.store.root.mkdir(parents=True, exist_ok=True)
        runner = web.AppRunner(self.application(), access_log=None, shutdown_timeout=2.0)
        await runner.setup()
        try:
            site = web.TCPSite(runner, self.settings.host, self.settings.port)
            try:
                await site.start()
            except OSError as error:
                raise _taken(self.settings, error) from error
            log.info("relay ready", address=runner.addresses, store=self.store.root.name)
            await stop.wait()
        finally:
            await runner.cleanup()

    def application(self) -> web.Application:
        """The routes."""
        app = web.Application(client_max_size=1024)
        app.router.add_get("/health", self._health)
        app.router.add_get("/weights", self._versions)
        app.router.add_get("/weights/{version}/{name}", self._file)
        app.on_response_prepare.append(self._tell)
        return app

    async def _tell(self, request: web.Request, response: web.StreamResponse) -> None:
        is_file = isinstance(response, web.FileResponse) and request.method == "GET"
        self.on_response(response.status, (response.content_length or 0) if is_file else 0)

    async def _health(self, _request: web.Request) -> web.Response:
        return web.json_response({"status": "ok"})

    async def _versions(self, _request: web.Request) -> web.Response:
        versions = await asyncio.to_thread(self.store.versions)
        return web.json_response({"versions": [str(version) for version in versions]})

    async def _file(self, request: web.Request) -> web.StreamResponse:
        version, name = request.match_info["version"], request.match_info["name"]
        path = await asyncio.to_thread(self.store.find, version, name)  # a slow disk must not hold up other downloads
        if path is None:
            if await asyncio.to_thread(self.store.is_gone, version):
                raise web.HTTPGone(text=f"version {version!r} was deleted; a newer one is announced on control\n")
            raise web.HTTPNotFound(text=f"no {name!r} of version {version!r}; GET /weights lists what there is\n")
        # It answers Range by itself, so that a download that broke off goes on where it was.
        return web.FileResponse(path, headers={"Content-Type": "application/octet-stream"})


def check_port(settings: RelaySettings) -> None:
    """Refuse a port that is taken, before anything is started that would have to end again.

    Raises:
        UserError: somebody listens there, or the host is not this machine's.
    """
    try:
        # As the relay itself will: a port that its predecessor has just left is free.
        family = socket.AF_INET6 if ":" in settings.host else socket.AF_INET
        with socket.create_server((settings.host, settings.port), family=family):
            pass
    except OSError as error:
        raise _taken(settings, error) from error


def _taken(settings: RelaySettings, error: OSError) -> UserError:
    return UserError(
        f"expected a free port for the relay, got {settings.host}:{settings.port} in use "
        f"({error.strerror}); choose another with --relay.port"
    )
