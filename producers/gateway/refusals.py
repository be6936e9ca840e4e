"""Errors that requesters get instead of an answer, in the shape of OpenAI's errors."""

import math
from typing import Any, Literal

from streamrl.schemas.errors import StreamRLError

ErrorType = Literal[
    "invalid_request_error",
    "authentication_error",
    "permission_error",
    "not_found_error",
    "rate_limit_error",
    "server_error",
]


class ApiError(StreamRLError):
    """An answer with an HTTP status of 400 or more. ``retry_after_s``: seconds until a retry may succeed, if any."""

    def __init__(
        self,
        status: int,
        message: str,
        *,
        kind: ErrorType = "invalid_request_error",
        param: str | None = None,
        code: str | None = None,
        retry_after_s: float | None = None,
    ) -> None:
        super().__init__(message)
        self.status, self.kind, self.param, self.code = status, kind, param, code
        self.retry_after_s = retry_after_s

    def body(self) -> dict[str, Any]:
        """The body, as OpenAI's clients read it."""
        return {"error": {"message": str(self), "type": self.kind, "param": self.param, "code": self.code}}

    def headers(self) -> dict[str, str]:
        """``Retry-After`` in whole seconds, at least one; ``WWW-Authenticate`` where a key is missing."""
        headers = {} if self.retry_after_s is None else {"Retry-After": str(max(1, math.ceil(self.retry_after_s)))}
        return headers | ({"WWW-Authenticate": "Bearer"} if self.status == 401 else {})


def invalid(param: str | None, message: str, code: str | None = None) -> ApiError:
    """400: the requester has to correct the request."""
    return ApiError(400, message, param=param, code=code)


def too_many(message: str, retry_after_s: float, code: str = "rate_limit_exceeded") -> ApiError:
    """429: the same request may succeed later."""
    return ApiError(429, message, kind="rate_limit_error", code=code, retry_after_s=retry_after_s)


def unavailable(message: str) -> ApiError:
    """503: no worker can answer now."""
    return ApiError(503, message, kind="server_error", code="service_unavailable", retry_after_s=2.0)


def failed(message: str) -> ApiError:
    """502: sampling failed, so the answer is missing or incomplete."""
    return ApiError(502, message, kind="server_error", code="generation_failed")
