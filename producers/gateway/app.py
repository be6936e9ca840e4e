"""The HTTP interface: OpenAI's routes, server-sent events, and access control.

Invariants, each with a test of its name:
- foreign_pages_are_refused: a request with a Host of another machine (DNS rebinding) or an Origin that the settings do
  not allow is refused;
- request_bodies_are_bounded: in bytes and in seconds, before the body is parsed;
- a_disconnected_requester_frees_its_slots, and the gateway disconnects a requester that does not read;
- done_is_sent_once: a stream ends with one [DONE], even after an error.
"""

import asyncio
import re
import time
import uuid
from collections.abc import Awaitable, Callable, Mapping
from dataclasses import dataclass
from typing import Any, Protocol

import structlog
from fastapi import FastAPI, Request
from fastapi.responses import JSONResponse, Response
from pydantic_core import to_json
from starlette.exceptions import HTTPException
from starlette.middleware.cors import CORSMiddleware
from starlette.requests import ClientDisconnect
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from streamrl.bus.serving import CLIENT_LEFT
from streamrl.producers.gateway.answers import AnswerShape, public_headers
from streamrl.producers.gateway.calls import DATASET, CompletionCall, Requester, RunningCall
from streamrl.producers.gateway.feedback import FeedbackDesk
from streamrl.producers.gateway.keys import KeyRing, KeyUse
from streamrl.producers.gateway.refusals import ApiError, invalid, unavailable
from streamrl.producers.gateway.requests import (
    SESSION_NAME,
    ApiModel,
    ChatCompletionRequest,
    FeedbackRequest,
    TextCompletionRequest,
    read_body,
)
from streamrl.producers.gateway.service import CompletionService
from streamrl.producers.gateway.settings import GatewaySettings
from streamrl.schemas.hosts import is_own_host

log = structlog.get_logger()

JSON = "application/json"
TRACEPARENT = "traceparent"
_REQUEST_ID = re.compile(r"[\x21-\x7e]{1,128}")
_DONE = b"data: [DONE]\n\n"
MAX_BODY_BYTES = 4 << 20
"""Largest body of a request: half a million token ids in JSON."""
BODY_TIMEOUT_S = 30.0
"""Seconds in which a request's body must arrive."""
READER_TIMEOUT_S = 30.0
"""Seconds after which a requester that reads nothing of its stream is disconnected."""
_NAMED = "streamrl.session"
"""Key of a request's scope: the session that the path names."""
_STARTED_AT = "streamrl.started_at"
"""Key of a request's scope: when it arrived, by ``time.monotonic``."""
_ABORT = "streamrl.abort"
"""Key of a request's scope: a function that ends the connection without waiting for the reader."""
_SESSION = re.compile(SESSION_NAME)
_SESSION_PATH = re.compile(r"/sessions/([^/]+)(/v1/.*)")
"""For programs in which only the address can be set: requests below this path belong to the session that it names."""


class RequestObserver(Protocol):
    """Observes requests, for metrics."""

    def answered(self, route: str, status: int, seconds: float) -> None:
        """An answer is complete, or was abandoned."""
        ...

    def first_token(self, seconds: float) -> None:
        """A request's first token arrived ``seconds`` after the request."""
        ...


@dataclass(frozen=True)
class NoRequestObserver:
    """A ``RequestObserver`` that does nothing."""

    def answered(self, route: str, status: int, seconds: float) -> None:
        """Do nothing."""

    def first_token(self, seconds: float) -> None:
        """Do nothing."""


def build_app(
    service: CompletionService, keys: KeyRing, settings: GatewaySettings, observer: RequestObserver
) -> ASGIApp:
    """The complete HTTP interface as an ASGI application."""
    app = FastAPI(title="StreamRL gateway", docs_url=None, redoc_url=None, separate_input_output_schemas=False)
    Routes(service, keys, observer).add_to(app)
    app.add_exception_handler(ApiError, _api_error)
    app.add_exception_handler(HTTPException, _http_error)
    app.add_exception_handler(Exception, _internal_error)
    guarded: ASGIApp = app
    if settings.allowed_origins:
        guarded = CORSMiddleware(
            app,
            allow_origins=settings.allowed_origins,
            allow_methods=["GET", "POST"],
            allow_headers=["*"],
            expose_headers=["x-request-id", "x-streamrl-weight-version", "x-streamrl-feedback", "x-streamrl-session"],
        )
    return Guard(guarded, settings, observer)


async def _api_error(_request: Request, error: Exception) -> Response:
    assert isinstance(error, ApiError), "registered for it"
    return JSONResponse(error.body(), error.status, error.headers())


async def _http_error(_request: Request, error: Exception) -> Response:
    assert isinstance(error, HTTPException), "registered for it"
    kind = "not_found_error" if error.status_code == 404 else "invalid_request_error"
    body = {"error": {"message": str(error.detail), "type": kind, "param": None, "code": None}}
    return JSONResponse(body, error.status_code, error.headers)


async def _internal_error(_request: Request, _error: Exception) -> Response:
    refusal = ApiError(500, "expected an answer, got an internal error; see the gateway's log", kind="server_error")
    return JSONResponse(refusal.body(), refusal.status)


@dataclass
class Guard:
    """The outermost layer: checks each request's Host and Origin, gives it an id, and answers errors left over."""

    app: ASGIApp
    settings: GatewaySettings
    observer: RequestObserver

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Pass a request on, or refuse it."""
        if scope["type"] != "http":
            return
        headers = {name.decode("latin-1"): value.decode("latin-1") for name, value in scope["headers"]}
        wanted = headers.get("x-request-id", "")
        request_id = (wanted if _REQUEST_ID.fullmatch(wanted) else uuid.uuid4().hex).encode()
        started_at, status = time.monotonic(), 0

        async def send_with_id(message: Message) -> None:
            nonlocal status
            if message["type"] == "http.response.start":
                status = message["status"]
                message["headers"] = [*message.get("headers", ()), (b"x-request-id", request_id)]
            await send(message)

        # ASGI cannot end a connection at once, so the transport comes from the server's object that owns ``send``.
        transport = getattr(getattr(send, "__self__", None), "transport", None)
        scope[_ABORT] = getattr(transport, "abort", lambda: None)
        scope[_STARTED_AT] = started_at
        if (found := _SESSION_PATH.fullmatch(scope["path"])) is not None:
            scope.update({_NAMED: found[1], "path": found[2], "raw_path": found[2].encode()})
        try:
            self._check(headers)
            await self.app(scope, receive, send_with_id)
        except ApiError as error:
            await JSONResponse(error.body(), error.status, error.headers())(scope, receive, send_with_id)
        except ClientDisconnect:
            log.debug("a requester left before its request was read")
        except asyncio.CancelledError:
            # The gateway stops, and this request took longer than the shutdown time-out.
            if status:
                scope[_ABORT]()
                await asyncio.sleep(0)  # the connection is closed now, so the server expects no more of the answer
            else:
                stops = unavailable("expected an answer, but the gateway is stopping; send this request again")
                await JSONResponse(stops.body(), stops.status, stops.headers())(scope, receive, send_with_id)
        except Exception:  # ``_internal_error`` has answered it, unless an answer had already started
            log.exception("a request failed", path=scope["path"])
        finally:
            route = getattr(scope.get("route"), "path", "other")
            self.observer.answered(route, status or CLIENT_LEFT, time.monotonic() - started_at)

    def _check(self, headers: Mapping[str, str]) -> None:
        host, origin = headers.get("host", ""), headers.get("origin")
        if not any(is_own_host(host, name) for name in (self.settings.host, *self.settings.allowed_hosts)):
            raise ApiError(
                421,
                "expected one of this gateway's names as Host, got another; see gateway.allowed_hosts",
                kind="permission_error",
            )
        own = {f"http://{host}", f"https://{host}", *self.settings.allowed_origins}
        if origin is not None and origin not in own:
            raise ApiError(
                403, "expected one of gateway.allowed_origins as Origin, got another", kind="permission_error"
            )


@dataclass
class Routes:
    """The routes and their handlers."""

    service: CompletionService
    keys: KeyRing
    observer: RequestObserver

    def add_to(self, app: FastAPI) -> None:
        """Add the routes, and their bodies to the OpenAPI description."""
        posts: tuple[tuple[str, Callable[..., Awaitable[Response]], type[ApiModel], str], ...] = (
            ("/v1/chat/completions", self.chat, ChatCompletionRequest, "Answer a conversation."),
            ("/v1/completions", self.text, TextCompletionRequest, "Continue a text."),
            ("/v1/feedback", self.feedback, FeedbackRequest, "Give a completion its reward, once."),
        )
        for path, endpoint, body, summary in posts:
            described = {"requestBody": {"required": True, "content": {JSON: {"schema": _schema(body)}}}}
            app.add_api_route(
                path, endpoint, methods=["POST"], summary=summary, openapi_extra=described, responses=_ERRORS
            )
        gets = (("/v1/models", self.models), ("/v1/models/{model:path}", self.model))
        for path, answer in gets:
            app.add_api_route(path, answer, methods=["GET"], responses=_ERRORS)
        app.add_api_route("/health", self.health, methods=["GET"], summary="Whether the gateway is alive.")
        app.add_api_route(
            "/ready", self.ready, methods=["GET"], summary="Whether a worker takes requests.", responses=_ERRORS
        )

    async def chat(self, request: Request) -> Response:
        """``POST /v1/chat/completions``."""
        use = self._admitted(request)
        wanted = read_body(ChatCompletionRequest, await self._body(request))
        return self._answer(request, await self.service.chat_call(wanted, _requester(request, use)))

    async def text(self, request: Request) -> Response:
        """``POST /v1/completions``."""
        use = self._admitted(request)
        wanted = read_body(TextCompletionRequest, await self._body(request))
        return self._answer(request, await self.service.text_call(wanted, _requester(request, use)))

    async def feedback(self, request: Request) -> Response:
        """``POST /v1/feedback``."""
        use = self._recognised(request)
        wanted = read_body(FeedbackRequest, await self._body(request))
        answer = await self._record_feedback(self.service.feedback, wanted, use.key.name)
        return JSONResponse(answer | {"trained_as": self.service.feedback.trained_as})

    @staticmethod
    async def _record_feedback(desk: FeedbackDesk, wanted: FeedbackRequest, key: str) -> dict[str, Any]:
        if wanted.session is not None:
            dataset = wanted.dataset or DATASET
            return await desk.end_session(key, wanted.session, wanted.by_choice[0], wanted.group, dataset)
        assert wanted.id is not None, "the body was checked: it has an id or a session"
        turn = await desk.reward_turn(wanted.id, key, wanted.by_choice)
        return await desk.reward(wanted.id, key, wanted.by_choice) if turn is None else turn

    async def models(self, request: Request) -> Response:
        """``GET /v1/models``."""
        self._recognised(request)
        return JSONResponse({"object": "list", "data": [self._model()]})

    async def model(self, request: Request, model: str) -> Response:
        """``GET /v1/models/{model}``."""
        self._recognised(request)
        if model != (known := self.service.model.name):
            raise ApiError(404, f"expected model {known}, got another", kind="not_found_error", code="model_not_found")
        return JSONResponse(self._model())

    async def health(self) -> Response:
        """``GET /health``: 200 while the event loop runs."""
        return JSONResponse({"status": "ok"})

    async def ready(self) -> Response:
        """``GET /ready``: 503 while no worker takes requests."""
        workers = len(self.service.pool.ready)
        return JSONResponse({"status": "ok" if workers else "no worker", "workers": workers}, 200 if workers else 503)

    def _model(self) -> dict[str, Any]:
        versions = [link.card.version for link in self.service.pool.ready if link.card is not None]
        newest = {"weight_version": str(max(versions))} if versions else {}
        return {"id": self.service.model.name, "object": "model", "created": 0, "owned_by": "streamrl"} | newest

    def _recognised(self, request: Request) -> KeyUse:
        given = request.headers.getlist("authorization")
        if len(given) > 1:
            raise ApiError(400, f"expected one Authorization header, got {len(given)}", code="invalid_api_key")
        return self.keys.key_use_of(given[0] if given else None)

    def _admitted(self, request: Request) -> KeyUse:
        """The requester's key, if there is room. Checked before the body is read, so that a refusal costs little."""
        use = self._recognised(request)
        self.service.pool.refuse_overload()
        return use

    async def _body(self, request: Request) -> bytes:
        headers, limit = request.headers, MAX_BODY_BYTES
        if headers.get("content-encoding", "identity") != "identity":
            raise ApiError(415, "expected a body without a Content-Encoding, got one with it")
        if headers.get("content-type", JSON).split(";")[0].strip().lower() != JSON:
            raise ApiError(415, f"expected Content-Type {JSON}, got another")
        too_large = ApiError(413, f"expected a body of at most {limit} bytes, got a larger one")
        length = headers.get("content-length", "0")
        if length.isdecimal() and int(length) > limit:
            raise too_large
        body = bytearray()
        try:
            async with asyncio.timeout(BODY_TIMEOUT_S):
                async for chunk in request.stream():
                    body += chunk
                    if len(body) > limit:
                        raise too_large
        except TimeoutError:
            raise ApiError(408, f"expected the whole body within {BODY_TIMEOUT_S:g} s, got a part of it") from None
        return bytes(body)

    def _answer(self, request: Request, call: CompletionCall) -> Response:
        return CallResponse(self.service, call, self.observer, request.scope[_STARTED_AT])


def _requester(request: Request, use: KeyUse) -> Requester:
    return Requester(use, _session(request), request.headers.get(TRACEPARENT, ""))


def _session(request: Request) -> str | None:
    name: str | None = request.scope.get(_NAMED) or request.headers.get("x-session-id")
    if name is not None and _SESSION.match(name) is None:
        raise invalid(
            "session", f"expected a session's name of 1 to 128 of A-Z, a-z, 0-9 and . _ : @ -, got {name!r:.80}"
        )
    return name


def _schema(body: type[ApiModel]) -> dict[str, Any]:
    """A body's JSON schema with its references resolved: in the OpenAPI description they would point nowhere."""
    schema = body.model_json_schema()
    definitions = schema.pop("$defs", {})

    def resolved(value: Any) -> Any:
        if isinstance(value, dict):
            if "$ref" in value:
                name = value["$ref"].rpartition("/")[2]
                # ``JsonValue`` refers to itself; {} allows any JSON value.
                return {} if name == "JsonValue" else resolved(definitions[name])
            return {key: resolved(one) for key, one in value.items()}
        return [resolved(one) for one in value] if isinstance(value, list) else value

    found: dict[str, Any] = resolved(schema)
    return found


_ERRORS: dict[int | str, dict[str, Any]] = {
    "4XX": {
        "description": "Refused, with the reason in OpenAI's shape.",
        "content": {
            JSON: {
                "schema": {
                    "type": "object",
                    "required": ["error"],
                    "properties": {"error": {"type": "object", "required": ["message", "type"]}},
                }
            }
        },
    },
    "5XX": {
        "description": "No worker is available, or the worker failed.",
        "content": {JSON: {"schema": {"type": "object"}}},
    },
}


class CallResponse(Response):
    """The answer to a call, whole or as a stream. Sending it starts the call.

    ``requested_at``: when the request arrived, by ``time.monotonic``.
    """

    def __init__(
        self, service: CompletionService, call: CompletionCall, observer: RequestObserver, requested_at: float
    ) -> None:
        super().__init__()
        self._service, self._call, self._observer, self._requested_at = service, call, observer, requested_at

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Answer, unless the requester disconnects first."""
        running, shape = self._service.run(self._call)
        work = asyncio.current_task()
        assert work is not None, "the server runs this in a task"
        watching = asyncio.create_task(_wait_for_disconnect(receive))
        watching.add_done_callback(lambda task: None if task.cancelled() else work.cancel())
        try:
            first = await running.next()
            self._observer.first_token(time.monotonic() - self._requested_at)
            if self._call.answer.stream:
                await self._stream(running, shape, shape.chunks(first), send, scope[_ABORT])
            else:
                while not running.is_over:
                    await running.next()
                headers = public_headers(self._call, str(running.version))
                await Response(to_json(shape.whole()), 200, headers, JSON)(scope, receive, send)
        except asyncio.CancelledError:
            if not watching.done():
                raise
            work.uncancel()  # the requester left
        finally:
            watching.cancel()
            self._service.end(running)

    async def _stream(
        self,
        running: RunningCall,
        shape: AnswerShape,
        first: list[dict[str, Any]],
        send: Send,
        abort: Callable[[], None],
    ) -> None:
        headers = public_headers(self._call, str(running.version)) | {
            "content-type": "text/event-stream; charset=utf-8",
            "cache-control": "no-store",
            "x-accel-buffering": "no",  # otherwise nginx buffers events
        }
        raw = [(name.encode(), value.encode()) for name, value in headers.items()]
        patience = ReaderTimeout(READER_TIMEOUT_S)

        async def send_chunks(*chunks: dict[str, Any], more: bool = True) -> None:
            data = b"".join(b"data: " + to_json(chunk) + b"\n\n" for chunk in chunks)
            with patience:
                await send({"type": "http.response.body", "body": data if more else data + _DONE, "more_body": more})

        async def send_all() -> None:
            await send_chunks(*first)
            try:
                while not running.is_over:
                    await send_chunks(*shape.chunks(await running.next()))
            except ApiError as error:
                await send_chunks(error.body(), more=False)
            else:
                await send_chunks(*shape.closing(), more=False)

        await send({"type": "http.response.start", "status": 200, "headers": raw})
        try:
            await send_all()
        except asyncio.CancelledError:
            if not patience.ended_it():
                raise
            log.warning(
                "a requester that reads nothing is disconnected", seconds=READER_TIMEOUT_S, call=self._call.public_id
            )
            abort()
        finally:
            patience.end()


class ReaderTimeout:
    """Cancels the task that created it when the task spends too long in one ``with``, since its reader takes nothing.

    The task is cancelled after one to two times ``timeout_s``. One timer looks from time to time: a timer for each
    chunk would be a large part of a token's cost.
    """

    def __init__(self, timeout_s: float) -> None:
        work = asyncio.current_task()
        assert work is not None, "the server runs this in a task"
        self._timeout_s, self._work, self._is_lost = timeout_s, work, False
        self._entered_at: float | None = None
        self._loop = asyncio.get_running_loop()
        self._timer = self._loop.call_later(timeout_s, self._look)

    def __enter__(self) -> None:
        self._entered_at = self._loop.time()

    def __exit__(self, *_error: object) -> None:
        self._entered_at = None

    def _look(self) -> None:
        waited = 0.0 if self._entered_at is None else self._loop.time() - self._entered_at
        if waited >= self._timeout_s:
            self._is_lost = True
            self._work.cancel()
        else:
            self._timer = self._loop.call_later(self._timeout_s - waited, self._look)

    def ended_it(self) -> bool:
        """Whether this object cancelled the task. If so, the cancellation is taken back."""
        if self._is_lost:
            self._work.uncancel()
        return self._is_lost

    def end(self) -> None:
        """Stop the timer."""
        self._timer.cancel()


async def _wait_for_disconnect(receive: Receive) -> None:
    while (await receive())["type"] != "http.disconnect":
        pass
