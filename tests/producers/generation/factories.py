"""Orders, announcements and a small relay, with only what differs spelled out."""

import os
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from hashlib import sha256
from typing import Any

from aiohttp import web
from aiohttp.test_utils import TestServer

from streamrl.schemas.control import WeightsReady
from streamrl.schemas.identifiers import PolicyVersion, make_group_id, make_prompt_id
from streamrl.schemas.trajectories import Prompt, WorkOrder
from streamrl.schemas.weights import DIRECTORY, WeightFile, WeightManifest
from tests.fakes import messages

WORKER = "w0"


def work_order(index: int = 0, *, samples: int = 2, **changes: Any) -> WorkOrder:
    prompt_id = make_prompt_id("d", index)
    prompt = Prompt(prompt_id=prompt_id, dataset="d", content=f"prompt {index}", columns={"answer": "42"})
    fields = {"worker_id": WORKER, "prompt": prompt, "partition": 3, "created_at": 1.0}
    return messages.work_order(make_group_id(prompt_id, 0), samples, **fields | changes)


@dataclass
class FakeRelay:
    """Serves ``content[version][name]``; ``requests`` lists the paths asked for. ``status`` overrides the answer.

    ``breaks_at``: byte of a file after which the connection breaks, once. ``sent``: bytes of bodies so far.
    ``ranged`` False: it does not know Range and sends all of a file.
    """

    content: dict[str, dict[str, bytes]] = field(default_factory=dict)
    requests: list[str] = field(default_factory=list)
    status: int | None = None
    address: str = ""
    breaks_at: int | None = None
    ranged: bool = True
    sent: int = 0

    def add(self, version: PolicyVersion, /, size: int = 3 << 20, **manifest_changes: Any) -> WeightsReady:
        """Put random weights there and return their announcement."""
        files = {"model.safetensors": os.urandom(size), "config.json": b"{}"}
        listed = tuple(
            WeightFile(name=name, size=len(data), sha256=sha256(data).hexdigest()) for name, data in files.items()
        )
        manifest = WeightManifest(version=version, step=version.number, files=listed, created_at=0.0)
        raw = manifest.model_copy(update=manifest_changes).model_dump_json().encode()
        self.content[str(version)] = files | {"manifest.json": raw}
        return self.announce(version, raw)

    def announce(self, version: PolicyVersion, raw_manifest: bytes) -> WeightsReady:
        return WeightsReady(
            sequence=version.number,
            sent_at=0.0,
            version=version,
            step=version.number,
            manifest_sha256=sha256(raw_manifest).hexdigest(),
            relays=(self.address,),
        )

    async def _answer(self, request: web.Request) -> web.StreamResponse:
        version, name = request.match_info["version"], request.match_info["name"]
        if name == DIRECTORY:  # as a relay of another host
            return web.Response(status=404)
        self.requests.append(f"{version}/{name}")
        if self.status is not None:
            return web.Response(status=self.status)
        if name not in self.content.get(version, {}):
            return web.Response(status=404)
        body = self.content[version][name]
        start = (request.http_range.start or 0) if self.ranged else 0
        response = web.StreamResponse(status=206 if start else 200)
        response.content_length = len(body) - start
        await response.prepare(request)
        end = len(body)
        if self.breaks_at is not None and self.breaks_at < end:
            end, self.breaks_at = self.breaks_at, None
        self.sent += end - start
        await response.write(body[start:end])
        if end < len(body):
            assert request.transport is not None
            request.transport.close()
        return response


@asynccontextmanager
async def running_relay() -> AsyncIterator[FakeRelay]:
    relay = FakeRelay()
    app = web.Application()
    app.router.add_get("/weights/{version}/{name}", relay._answer)
    app.router.add_get("/arms/{series}/weights/{version}/{name}", relay._answer)
    async with TestServer(app) as server:
        relay.address = str(server.make_url("")).rstrip("/")
        yield relay
