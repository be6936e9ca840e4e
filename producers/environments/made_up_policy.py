"""An endpoint whose policy answers every request with the same text, to play an episode without a model."""

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any

from aiohttp import web

from streamrl.schemas.environments import Endpoint

ANSWER = "I do not know."
MODEL = "made-up"


@asynccontextmanager
async def made_up_policy() -> AsyncIterator[Endpoint]:
    """An endpoint on a free port of this machine that speaks OpenAI's API and takes feedback."""
    app = web.Application()
    message = {"role": "assistant", "content": ANSWER}
    app.router.add_post("/v1/chat/completions", _answering("chat.completion", {"message": message}))
    app.router.add_post("/v1/completions", _answering("text_completion", {"text": ANSWER}))
    app.router.add_post("/v1/feedback", _answering("feedback", {}))
    runner = web.AppRunner(app, access_log=None)
    await runner.setup()
    try:
        site = web.TCPSite(runner, "127.0.0.1", 0)
        await site.start()
        host, port = runner.addresses[0][:2]
        yield Endpoint(f"http://{host}:{port}/v1", "none", MODEL)
    finally:
        await runner.cleanup()


def _answering(kind: str, choice: dict[str, Any]) -> Any:
    async def answer(_request: web.Request) -> web.Response:
        choices = [{"index": 0, "finish_reason": "stop", **choice}]
        usage = {"prompt_tokens": 1, "completion_tokens": 1, "total_tokens": 2}
        fields = {"id": f"{MODEL}-1", "object": kind, "created": 0, "model": MODEL}
        return web.json_response(fields | {"choices": choices, "usage": usage})

    return answer
