"""API keys: made, kept as hashes in a file, recognised, and held to their limits.

Invariants, each with a test of its name:
- a_key_is_shown_once: the file holds SHA-256 of it, which is enough for 256 random bits that no list of words contains;
- a_limit_is_per_key: one requester's excess costs another nothing;
- a_changed_file_counts_at_once: keys come and go without a restart.
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
"""By which people and secret scanners know such a key."""


class ApiKey(BaseModel):
    """A requester. ``train``: has agreed that what is sampled for it is trained on. Limits: none is no limit."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    name: str
    sha256: Annotated[str, Field(pattern=r"^[0-9a-f]{64}$")]
    train: bool = False
    requests_per_minute: Annotated[int, Field(ge=1)] | None = None
    tokens_per_minute: Annotated[int, Field(ge=1)] | None = None
    concurrent: Annotated[int, Field(ge=1)] | None = None
    created_at: float = 0.0


ANYONE = ApiKey(name="anyone", sha256="0" * 64)
"""Who comes without a key where none is required; nothing that is sampled for it is trained on."""
_keys: TypeAdapter[list[ApiKey]] = TypeAdapter(list[ApiKey])


@dataclass(frozen=True)
class KeyFile:
    """The keys in a file that only its owner reads."""

    path: Path

    def read(self) -> list[ApiKey]:
        """All keys; none if there is no file.

        Raises:
            UserError: it is no such file.
        """
        try:
            return _keys.validate_json(self.path.read_bytes())
        except FileNotFoundError:
            return []
        except (OSError, ValidationError) as error:
            said = error.strerror if isinstance(error, OSError) else error.errors()[0]["msg"]
            raise UserError(
                f"expected API keys in {self.path}, got: {said}; restore it, or make keys anew with "
                "`streamrl gateway keys add`"
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
        """Make a key and keep its hash; the key itself, which nobody can tell again.

        Raises:
            UserError: the name is taken or not plain, or the file cannot be written.
        """
        keys = self.read()
        if not is_plain_name(name) or name == ANYONE.name:
            raise UserError(f"expected a name of a-z, 0-9, '.', '_' and '-' for the key, got {name!r}")
        if any(key.name == name for key in keys):
            raise UserError(f"expected a new name for the key, got {name}, which has one; remove that first")
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
        """Let nobody in with this key any more.

        Raises:
            UserError: there is no such key.
        """
        keys = self.read()
        left = [key for key in keys if key.name != name]
        if len(left) == len(keys):
            raise UserError(f"expected the name of a key in {self.path}, got {name!r}; `keys list` shows them")
        self._write(left)

    def _write(self, keys: list[ApiKey]) -> None:
        new = self.path.with_name(f".{self.path.name}.new")
        try:
            self.path.parent.mkdir(parents=True, exist_ok=True)
            # Readable by the owner alone from its first byte on; an open gateway sees the old file or the new.
            with open(os.open(new, os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o600), "wb") as file:
                file.write(_keys.dump_json(keys, indent=2) + b"\n")
            new.replace(self.path)
        except OSError as error:
            raise UserError(f"expected to write API keys into {self.path}, got: {error.strerror}") from error


def _hash(secret: str) -> str:
    return sha256(secret.encode(errors="replace")).hexdigest()


@dataclass
class KeyUse:
    """How much of its limits a key has used: buckets that fill up again by the minute. Times in seconds.

    A request is let in while there is anything in both buckets. Tokens are charged when they are known, so the second
    may run into debt, which holds back the requests that follow.
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
        """A request begins.

        Raises:
            ApiError: the key is at one of its limits; when to ask again.
        """
        self._fill()
        key = self.key
        if key.concurrent is not None and self.running >= key.concurrent:
            raise too_many(f"key {key.name} may have {key.concurrent} requests at once, and has", 1.0)
        if key.requests_per_minute is not None and self._requests < 1:
            wait_s = (1 - self._requests) * 60 / key.requests_per_minute
            raise too_many(f"key {key.name} may make {key.requests_per_minute} requests a minute, and has", wait_s)
        if key.tokens_per_minute is not None and self._tokens <= 0:
            wait_s = (1 - self._tokens) * 60 / key.tokens_per_minute
            raise too_many(f"key {key.name} may use {key.tokens_per_minute} tokens a minute, and has", wait_s)
        self._requests -= 1
        self.running += 1

    def leave(self, tokens: int) -> None:
        """It is over, with so many tokens of prompt and completions."""
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
    """Recognises keys by the file as it is now; ``required`` false lets in who brings none."""

    file: KeyFile
    required: bool = True
    clock: Callable[[], float] = time.monotonic
    _seen: tuple[int, int] | None = None
    _keys: dict[str, ApiKey] = field(default_factory=dict)
    _uses: dict[str, KeyUse] = field(default_factory=dict)

    def recognise(self, authorization: str | None) -> KeyUse:
        """Whose request it is, by its Authorization header.

        Raises:
            ApiError: nobody's that is known here.
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
        # The look-up is by a hash, whose timing tells nothing of the key; compared once more without a short cut.
        if key is None or not hmac.compare_digest(key.sha256, digest):
            if not self.required:
                return self._use(ANYONE)  # clients of OpenAI always send a key, whatever it is
            raise _unauthorised(
                "expected an API key of this gateway, got another; `streamrl gateway keys add` makes one"
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
        # A file put in place anew has another inode, even within one tick of the clock.
        mark = (found.st_mtime_ns, found.st_ino)
        if mark == self._seen:
            return
        self._seen = mark
        try:
            self._keys = {key.sha256: key for key in self.file.read()}
        except UserError as error:  # whoever had a key before still has it
            log.error("the file of API keys was not read again", error=str(error))


def _unauthorised(message: str) -> ApiError:
    return ApiError(401, message, kind="authentication_error", code="invalid_api_key")
