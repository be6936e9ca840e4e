"""What a worker and a weight sender say to each other over HTTP before tensors come: a turn is asked for, and given."""

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
"""In the directory of a version of which a worker has nothing but this: who is to be asked for it."""
MAX_REQUEST_BYTES = 4096


class SentVersion(Part):
    """Content of ``SENT``: a version, by the sha256 of its manifest, and the address of its sender."""

    sender: ShortText
    version: PolicyVersion
    manifest_sha256: Sha256


class TurnRequest(Part):
    """``session``: a name that the engine gave itself; ``ranks``: how many processes it computes in."""

    version: PolicyVersion
    manifest_sha256: Sha256
    session: Annotated[str, Field(pattern=r"^[0-9a-f]{32}$")]
    ranks: Annotated[int, Field(ge=1, le=4096)]


class SendingTurn(Part):
    """``meeting``: how the ranks join the sender's group, empty where they have; then what comes, in this order.

    ``sums``: ``word_sum`` of each tensor.
    """

    meeting: dict[str, str | int | float | bool]
    names: tuple[str, ...]
    dtype_names: tuple[str, ...]
    shapes: tuple[tuple[int, ...], ...]
    sums: tuple[int, ...]

    @property
    def update_info(self) -> dict[str, Any]:
        """As vLLM's ``update_weights`` takes it."""
        shapes = [list(shape) for shape in self.shapes]
        return {"names": list(self.names), "dtype_names": list(self.dtype_names), "shapes": shapes}


def read_sent(directory: Path) -> SentVersion | None:
    """What a version's directory says of a sender; None where the version is in files."""
    path = directory / SENT
    return SentVersion.model_validate_json(path.read_bytes()) if path.is_file() else None


class TurnAsker:
    """An engine's requests for turns, one at a time: under the name ``session``, for so many ``ranks``."""

    def __init__(self, session: str, ranks: int, timeout_s: float) -> None:
        self._session, self._ranks, self._timeout_s = session, ranks, timeout_s
        self._connection: HTTPConnection | None = None

    def ask(self, sent: SentVersion) -> SendingTurn:
        """Wait until it is this engine's turn; from then on the sender sends. Blocks.

        Raises:
            WeightsError: the sender is not there, does not have the version, or has no time; or this was given up.
        """
        asked = TurnRequest(
            version=sent.version, manifest_sha256=sent.manifest_sha256, session=self._session, ranks=self._ranks
        )
        where = urlsplit(sent.sender)
        try:
            with closing(HTTPConnection(where.hostname or "", where.port, timeout=self._timeout_s)) as connection:
                self._connection = connection
                connection.request("POST", "/turns", asked.model_dump_json(), {"Content-Type": "application/json"})
                answer = connection.getresponse()
                content = answer.read()
            if answer.status == HTTPStatus.OK:
                return SendingTurn.model_validate_json(content)
        except (OSError, HTTPException, ValueError) as error:
            raise WeightsError(f"expected {sent.sender} to send weights {sent.version}, got {error}") from error
        finally:
            self._connection = None
        said = content.decode(errors="replace").strip()
        raise WeightsError(f"expected {sent.sender} to send weights {sent.version}, got {answer.status}: {said}")

    def give_up(self) -> None:
        """Have a request that waits for its answer fail at once; from any thread."""
        connection = self._connection
        socket = None if connection is None else connection.sock
        if socket is not None:
            with suppress(OSError):
                socket.shutdown(SHUT_RDWR)
