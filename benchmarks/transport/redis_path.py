"""The peer's path through a Redis stream, as PipelineRL's ``streams.py`` does it (ServiceNow/PipelineRL, 58d3934).

Records are pickled and added under a running index; the reader blocks for a tenth of a second. *single*: one record an
entry, one entry a request. *group*: an entry holds the records of a group, as PipelineRL's actor writes them, once the
last of them is there. *batched*: one record an entry, and as many entries in a pipeline of ``XADD``, or asked for by
``XREAD``, as our publisher's batches hold.

The only file of the project that unpickles: this peer does, and only its own loopback server's entries are read here.
"""

import pickle
import time
from collections.abc import Callable
from typing import Any

import redis

from benchmarks.transport.round import BATCH_BYTES, LINGER_S, Ends, MicroBatches, Round
from benchmarks.transport.workload import GROUP_SIZE, as_lists, as_record, ended_trajectories, to_arrays

MAX_ENTRIES = 1_000_000
BLOCK_MS = 100


def produce(asked: Round, started: Callable[[], None]) -> Ends:
    """Publish the round."""
    pool = [as_lists(ended) for ended in ended_trajectories(asked.tokens, asked.seed)]
    with _connected(asked) as client:
        writer = _Writer(client, asked)
        started()
        ends = Ends(asked, before_waiting=writer.flush)
        group: list[dict[str, Any]] = []
        for index in ends:
            record = as_record(pool[index % len(pool)], index)
            if asked.batching != "group":
                writer.add(index, [record])
                continue
            group.append(record)
            if len(group) == GROUP_SIZE or index == asked.count - 1:
                writer.add(index + 1 - len(group), group)
                group = []
        writer.flush()
    return ends


class _Writer:
    """Adds entries, at once or a batch of them in one pipeline."""

    def __init__(self, client: "redis.Redis", asked: Round) -> None:
        self._client, self._pipeline = client, client.pipeline(transaction=False)
        self._asked = asked
        self._held, self._since = 0, time.monotonic()

    def add(self, first: int, records: list[dict[str, Any]]) -> None:
        """One entry, of records that are numbered from ``first`` on."""
        data = pickle.dumps(records)
        is_batched = self._asked.batching == "batched"
        into = self._pipeline if is_batched else self._client
        into.xadd(self._asked.stream, {"index": first, "data": data}, maxlen=MAX_ENTRIES, approximate=True)
        self._held += len(data) if is_batched else 0
        if self._held >= BATCH_BYTES or time.monotonic() - self._since >= LINGER_S:
            self.flush()

    def flush(self) -> None:
        """Send what is held."""
        if self._held:
            self._pipeline.execute()
        self._held, self._since = 0, time.monotonic()


def consume(asked: Round, started: Callable[[], None]) -> MicroBatches:
    """Read the round: one entry per request, or as many as a batch has bytes."""
    batches = MicroBatches()
    last_id: bytes | int = 0
    count = 1
    with _connected(asked) as client:
        started()
        while len(batches.entered) < asked.count:
            response = client.xread({asked.stream: last_id}, count=count, block=BLOCK_MS)
            if not response:
                continue
            ((_, entries),) = response
            for _, entry in entries:
                records = pickle.loads(entry[b"data"])  # noqa: S301 — see above
                for index, record in enumerate(records, start=int(entry[b"index"])):
                    batches.add(index, to_arrays(record), record["output_tokens"])
                if asked.batching == "batched":
                    count = max(1, BATCH_BYTES // len(entry[b"data"]))
            last_id = entries[-1][0]
    return batches


def _connected(asked: Round) -> "redis.Redis":
    host, _, port = asked.address.partition(":")
    client = redis.Redis(host=host, port=int(port))
    client.ping()
    return client
