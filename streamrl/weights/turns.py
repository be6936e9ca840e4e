"""The HTTP exchange between worker and weight sender: the worker requests a turn, then the sender sends tensors."""

from contextlib import closing, suppress
from http import HTTPStatus
from http.client import HTTPConnection, HTTPException
from pathlib import Path
from socket import SHUT_RDWR
from typing import Annotated, Any
from urllib.parse import urlsplit

from pydantic import Field

from streamrl.schemas.errors import WeightsError
from streamrl.schemas.identifiers import PolicyVersion
from streamrl.schemas.trajectories import Part, ShortText
from streamrl.schemas.weights import Sha256

SENT = "sent.json"
"""File that names the sender of a version. It is the only file in that version's directory."""
MAX_REQUEST_BYTES = 4096


class SentVersion(Part):
    """Content of ``SENT``: a version, the sha256 of its manifest, and the address of its sender."""

    sender: ShortText
    version: PolicyVersion
    manifest_sha256: Sha256


class TurnRequest(Part):
    """An engine's request for a turn.

    ``session``: a name that the engine chose; ``ranks``: the number of the engine's processes.
    """

    version: PolicyVersion
    manifest_sha256: Sha256
    session: Annotated[str, Field(pattern=r"^[0-9a-f]{32}$")]
    ranks: Annotated[int, Field(ge=1, le=4096)]


class SendingTurn(Part):
    """The answer to a request for a turn: which tensors the sender sends, in this order.

    ``meeting``: how the ranks join the sender's group; empty if they have joined already. ``sums``: ``word_sum`` of
    each tensor.
    """

    meeting: dict[str, str | int | float | bool]
    names: tuple[str, ...]
    dtype_names: tuple[str, ...]
    shapes: tuple[tuple[int, ...], ...]
    sums: tuple[int, ...]

    @property
    def update_info(self) -> dict[str, Any]:
        """The argument of vLLM's ``update_weights``."""
        shapes = [list(shape) for shape in self.shapes]
        return {"names": list(self.names), "dtype_names": list(self.dtype_names), "shapes": shapes}


def read_sent(directory: Path) -> SentVersion | None:
    """The sender that a version's directory names; None if the version is in files."""
    path = directory / SENT
    return SentVersion.model_validate_json(path.read_bytes()) if path.is_file() else None


class TurnAsker:
    """Requests turns for one engine, one at a time."""

    def __init__(self, session: str, ranks: int, timeout_s: float) -> None:
        self._session, self._ranks, self._timeout_s = session, ranks, timeout_s
        self._connection: HTTPConnection | None = None

    def ask(self, sent: SentVersion) -> SendingTurn:
        """Wait until it is this engine's turn; then the sender starts to send. Blocks.

        Raises:
            WeightsError: the sender is not there, does not have the version, or is busy; or ``give_up`` was called.
        """
        request = TurnRequest(
            version=sent.version, manifest_sha256=sent.manifest_sha256, session=self._session, ranks=self._ranks
        )
        where = urlsplit(sent.sender)
        try:
            with closing(HTTPConnection(where.hostname or "", where.port, timeout=self._timeout_s)) as connection:
                self._connection = connection
                connection.request("POST", "/turns", request.model_dump_json(), {"Content-Type": "application/json"})
                answer = connection.getresponse()
                content = answer.read()
            if answer.status == HTTPStatus.OK:
                return SendingTurn.model_validate_json(content)
        except (OSError, HTTPException, ValueError) as error:
            raise WeightsError(f"expected {sent.sender} to send weights {sent.version}, got {error}") from error
        finally:
            self._connection = None
        reason = content.decode(errors="replace").strip()
        raise WeightsError(f"expected {sent.sender} to send weights {sent.version}, got {answer.status}: {reason}")

    def give_up(self) -> None:
        """Make a waiting request fail at once. May be called from any thread."""
        connection = self._connection
        socket = None if connection is None else connection.sock
        if socket is not None:
            with suppress(OSError):
                socket.shutdown(SHUT_RDWR)
