"""Series of weights as a test orders them: by splits on control, read here without the feature that orders them."""

from streamrl.schemas.control import PolicySplit
from streamrl.schemas.messages import Message


class OrderedSeries:
    """``WantedSeries`` by the last split."""

    def __init__(self) -> None:
        self.names: frozenset[str] | None = None
        self._workers: dict[str, str] = {}

    def observe(self, message: Message) -> bool:
        if not isinstance(message, PolicySplit):
            return False
        self.names, self._workers = frozenset(message.shares), message.workers
        return True

    def of_worker(self, worker_id: str) -> str:
        return self._workers.get(worker_id, "")
