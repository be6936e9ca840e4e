"""Whether the broker answers its readers: told once when that changes, however many ask and however often."""

from dataclasses import dataclass

import structlog

from schemas.errors import BusUnavailable, StreamRLError, TopicMissing

log = structlog.get_logger()


def advised(error: StreamRLError, advice: str) -> str:
    """The error's text; if it says that no broker answers, with the advice."""
    silent = isinstance(error, BusUnavailable) and not isinstance(error, TopicMissing)
    return f"{error}; {advice}" if silent and advice else str(error)


@dataclass
class Outage:
    """Of the broker at ``address``. ``advice``: what a user can do about it."""

    address: str = ""
    advice: str = ""
    goes_on: bool = False

    @property
    def message(self) -> str:
        """What is told when it begins."""
        return f"the broker at {self.address} does not answer" + (f"; {self.advice}" if self.advice else "")

    def begin(self, client_id: str, error: Exception) -> None:
        """No answer: told, unless it was before."""
        if not self.goes_on:
            self.goes_on = True
            log.warning(self.message, client_id=client_id, error=str(error))

    def end(self, client_id: str) -> None:
        """An answer: told, if there was none before."""
        if self.goes_on:
            self.goes_on = False
            log.warning(f"the broker at {self.address} answers again", client_id=client_id)
