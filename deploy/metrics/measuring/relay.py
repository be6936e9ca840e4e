"""A relay that counts what it serves."""

from dataclasses import dataclass

from aiohttp import web

from coordinator.relay.server import Relay
from deploy.metrics.meters import Meters


@dataclass
class MeasuredRelay(Relay):
    """Bytes count when an answer begins; a transfer that breaks off and goes on with a range counts twice in part."""

    meters: Meters

    def application(self) -> web.Application:
        """The routes, with a meter on every answer."""
        app = super().application()
        app.on_response_prepare.append(self._count)
        return app

    async def _count(self, request: web.Request, response: web.StreamResponse) -> None:
        self.meters.count("relay_requests", str(response.status))
        if isinstance(response, web.FileResponse) and request.method == "GET" and response.content_length is not None:
            self.meters.count("weight_transfer_bytes", by=response.content_length)
