"""API keys: creates them, keeps their hashes in a file, recognises them, and enforces their limits.

Invariants, each with a test of its name:
- a_key_is_shown_once: the file holds only the key's SHA-256, which is safe for 256 random bits that no dictionary has;
- limits_are_per_key: a requester that reaches its limits does not slow down another;
- a_changed_key_file_counts_at_once: keys are added and removed without a restart.
"""

import hmac
import os
import secrets
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from hashlib import sha256
from pathlib import Path
from typing import Annotated

import structlog
from pydantic import BaseModel, ConfigDict, Field, TypeAdapter, ValidationError

from streamrl.producers.gateway.refusals import ApiError, too_many
from streamrl.schemas.errors import UserError
from streamrl.schemas.identifiers import is_plain_name

log = structlog.get_logger()

PREFIX = "sk-streamrl-"
"""Prefix by which people and secret scanners recognise a key."""


class ApiKey(BaseModel):
    """A requester's key. ``train``: the requester consents to training on its completions. Limits: None is no limit."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    name: str
    sha256: Annotated[str, Field(pattern=r"^[0-9a-f]{64}$")]
    train: bool = False
    requests_per_minute: Annotated[int, Field(ge=1)] | None = None
    tokens_per_minute: Annotated[int, Field(ge=1)] | None = None
    concurrent: Annotated[int, Field(ge=1)] | None = None
    created_at: float = 0.0


ANYONE = ApiKey(name="anyone", sha256="0" * 64)
"""The requester without a known key, where none is required. Its completions are never trained on."""
_keys: TypeAdapter[list[ApiKey]] = TypeAdapter(list[ApiKey])


@dataclass(frozen=True)
class KeyFile:
    """The file of keys, which only its owner can read."""

    path: Path

    def read(self) -> list[ApiKey]:
        """All keys; an empty list if there is no file.

        Raises:
            UserError: it is not a file of keys.
        """
        try:
            return _keys.validate_json(self.path.read_bytes())
        except FileNotFoundError:
            return []
        except (OSError, ValidationError) as error:
            said = error.strerror if isinstance(error, OSError) else error.errors()[0]["msg"]
            raise UserError(
                f"expected API keys in {self.path}, got: {said}; restore the file, or delete it and make new keys with "
                "`streamrl gateway keys add NAME --run RUN`"
            ) from error

    def make_key(
        self,
        name: str,
        *,
        train: bool = False,
        requests_per_minute: int | None = None,
        tokens_per_minute: int | None = None,
        concurrent: int | None = None,
    ) -> str:
        """Create a key and keep its hash. Returns the key, which cannot be shown again.

        Raises:
            UserError: the name is taken or not plain, or the file cannot be written.
        """
        keys = self.read()
        if not is_plain_name(name) or name == ANYONE.name:
            raise UserError(f"expected a name of a-z, 0-9, '.', '_' and '-' for the key, got {name!r}")
        if any(key.name == name for key in keys):
            raise UserError(f"expected a new name for the key, got {name}, which already has a key; remove that first")
        secret = PREFIX + secrets.token_urlsafe(32)
        made = ApiKey(
            name=name,
            sha256=_hash(secret),
            train=train,
            requests_per_minute=requests_per_minute,
            tokens_per_minute=tokens_per_minute,
            concurrent=concurrent,
            created_at=time.time(),
        )
        self._write([*keys, made])
        return secret

    def remove(self, name: str) -> None:
        """Revoke the key of this name.

        Raises:
            UserError: there is no such key.
        """
        keys = self.read()
        left = [key for key in keys if key.name != name]
        if len(left) == len(keys):
            raise UserError(
                f"expected the name of a key in {self.path}, got {name!r}; `streamrl gateway keys ls --run RUN` lists "
                "them"
            )
        self._write(left)

    def _write(self, keys: list[ApiKey]) -> None:
        new = self.path.with_name(f".{self.path.name}.new")
        try:
            self.path.parent.mkdir(parents=True, exist_ok=True)
            # Only the owner can read it, from its first byte on. A running gateway sees the old file or the new one.
            with open(os.open(new, os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o600), "wb") as file:
                file.write(_keys.dump_json(keys, indent=2) + b"\n")
            new.replace(self.path)
        except OSError as error:
            raise UserError(f"expected to write API keys to {self.path}, got: {error.strerror}") from error


def _hash(secret: str) -> str:
    return sha256(secret.encode(errors="replace")).hexdigest()


@dataclass
class KeyUse:
    """A key's use of its limits, as token buckets that refill over a minute. ``clock`` is in seconds.

    A request is admitted while both buckets hold something. Tokens are charged when the request is over, so the bucket
    of tokens may go below zero, which delays the requests that follow.
    """

    key: ApiKey
    clock: Callable[[], float] = time.monotonic
    running: int = 0
    _requests: float = field(init=False)
    _tokens: float = field(init=False)
    _filled_at: float = field(init=False)

    def __post_init__(self) -> None:
        self._requests = float(self.key.requests_per_minute or 0)
        self._tokens = float(self.key.tokens_per_minute or 0)
        self._filled_at = self.clock()

    def enter(self) -> None:
        """Charge a request that starts.

        Raises:
            ApiError: the key has reached one of its limits; the error says when to ask again.
        """
        self._fill()
        key = self.key
        if key.concurrent is not None and self.running >= key.concurrent:
            raise too_many(f"key {key.name} has reached its limit of {key.concurrent} requests at once", 1.0)
        if key.requests_per_minute is not None and self._requests < 1:
            wait_s = (1 - self._requests) * 60 / key.requests_per_minute
            limit = f"{key.requests_per_minute} requests a minute"
            raise too_many(f"key {key.name} has reached its limit of {limit}", wait_s)
        if key.tokens_per_minute is not None and self._tokens <= 0:
            wait_s = (1 - self._tokens) * 60 / key.tokens_per_minute
            raise too_many(f"key {key.name} has reached its limit of {key.tokens_per_minute} tokens a minute", wait_s)
        self._requests -= 1
        self.running += 1

    def leave(self, tokens: int) -> None:
        """Charge a finished request for its ``tokens``, those of prompts and completions."""
        self.running -= 1
        self._tokens -= tokens

    def _fill(self) -> None:
        now = self.clock()
        minutes, self._filled_at = (now - self._filled_at) / 60, now
        if (limit := self.key.requests_per_minute) is not None:
            self._requests = min(limit, self._requests + minutes * limit)
        if (limit := self.key.tokens_per_minute) is not None:
            self._tokens = min(limit, self._tokens + minutes * limit)


@dataclass
class KeyRing:
    """Recognises keys by the current file. ``required``: whether a request without a known key is refused."""

    file: KeyFile
    required: bool = True
    clock: Callable[[], float] = time.monotonic
    _seen: tuple[int, int] | None = None
    _keys: dict[str, ApiKey] = field(default_factory=dict)
    _uses: dict[str, KeyUse] = field(default_factory=dict)

    def key_use_of(self, authorization: str | None) -> KeyUse:
        """The use of the key in a request's Authorization header.

        Raises:
            ApiError: there is no key, or it is unknown.
        """
        scheme, _, secret = (authorization or "").partition(" ")
        secret = secret.strip()
        if not secret and not self.required:
            return self._use(ANYONE)
        if scheme.lower() != "bearer" or not secret:
            raise _unauthorised("expected an API key as Authorization: Bearer KEY, got none")
        self._refresh()
        digest = _hash(secret)
        key = self._keys.get(digest)
        # The look-up uses a hash, so its timing reveals nothing of the key. Compared again in constant time.
        if key is None or not hmac.compare_digest(key.sha256, digest):
            if not self.required:
                return self._use(ANYONE)  # OpenAI's clients always send some key
            raise _unauthorised(
                "expected an API key of this gateway, got an unknown one; `streamrl gateway keys add` makes one"
            )
        return self._use(key)

    def _use(self, key: ApiKey) -> KeyUse:
        use = self._uses.get(key.name)
        if use is None or use.key != key:
            use = self._uses[key.name] = KeyUse(key, self.clock)
        return use

    def _refresh(self) -> None:
        try:
            found = self.file.path.stat()
        except OSError:
            self._keys, self._seen = {}, None
            return
        # A replaced file has another inode, even within one tick of the clock.
        mark = (found.st_mtime_ns, found.st_ino)
        if mark == self._seen:
            return
        self._seen = mark
        try:
            self._keys = {key.sha256: key for key in self.file.read()}
        except UserError as error:  # the keys that were read before stay valid
            log.error("the changed file of API keys cannot be read", error=str(error))


def _unauthorised(message: str) -> ApiError:
    return ApiError(401, message, kind="authentication_error", code="invalid_api_key")
