"""Stores a run's identity in its directory."""

import os
import uuid
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol

from pydantic import ValidationError

from streamrl.schemas.control import RunIdentity
from streamrl.schemas.errors import UserError

IDENTITY_FILE = "identity.json"


class IdentityStore(Protocol):
    """Where a run's directory keeps its identity."""

    def load(self) -> RunIdentity | None:
        """The stored identity; None if there is none."""
        ...

    def swap(self, before: RunIdentity | None, after: RunIdentity | None) -> bool:
        """Store ``after`` (None: delete the identity) if ``before`` is stored now; false otherwise.

        If two callers find no identity at the same time, exactly one gets true.
        """
        ...


@dataclass
class MemoryIdentity:
    """The identity of a run without a directory; it lives as long as this object."""

    identity: RunIdentity | None = None

    def load(self) -> RunIdentity | None:
        """See ``IdentityStore``."""
        return self.identity

    def swap(self, before: RunIdentity | None, after: RunIdentity | None) -> bool:
        """See ``IdentityStore``."""
        if self.identity != before:
            return False
        self.identity = after
        return True


@dataclass(frozen=True)
class IdentityFile:
    """``identity.json`` in the run's directory."""

    directory: Path

    @property
    def path(self) -> Path:
        """The file's path."""
        return self.directory / IDENTITY_FILE

    @property
    def run_id(self) -> str | None:
        """The id of the run whose directory this is; None if the directory has no identity."""
        found = self.load()
        return found.run_id if found is not None else None

    def load(self) -> RunIdentity | None:
        """See ``IdentityStore``.

        Raises:
            UserError: the file cannot be read.
        """
        try:
            return RunIdentity.model_validate_json(self.path.read_bytes())
        except (FileNotFoundError, NotADirectoryError):
            return None
        except (OSError, ValidationError) as error:
            first = str(error).splitlines()[0]
            raise UserError(
                f"expected the identity of a run in {self.path}, got: {first}; restore the file, or remove it and "
                "start once with --adopt"
            ) from error

    def swap(self, before: RunIdentity | None, after: RunIdentity | None) -> bool:
        """See ``IdentityStore``; the file is written atomically and durably.

        Raises:
            UserError: the file cannot be written.
        """
        if self.load() != before:
            return False
        try:
            if after is None:
                self.path.unlink(missing_ok=True)
                return True
            self.directory.mkdir(parents=True, exist_ok=True)
            return self._put(after, only_if_new=before is None)
        except OSError as error:
            raise UserError(
                f"expected a writable directory for the run, got {self.directory}: {error.strerror}"
            ) from error

    def _put(self, identity: RunIdentity, *, only_if_new: bool) -> bool:
        # A unique name, so that two processes that write at the same time do not share a file.
        temporary = self.directory / f".{IDENTITY_FILE}.{uuid.uuid4().hex}"
        try:
            with temporary.open("xb") as file:
                file.write(identity.model_dump_json(indent=1).encode() + b"\n")
                file.flush()
                os.fsync(file.fileno())
            if not only_if_new:
                temporary.replace(self.path)
                return True
            # A link fails if the name is taken; a rename would replace the file.
            self.path.hardlink_to(temporary)
        except FileExistsError:
            return False
        finally:
            temporary.unlink(missing_ok=True)
        return True
