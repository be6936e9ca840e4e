"""The peer's path through a Redis stream, as PipelineRL's ``streams.py`` does it (ServiceNow/PipelineRL, 58d3934).

A record is pickled whole and added under a running index; the reader asks for one entry at a time and blocks for a
tenth of a second. The only file of the project that unpickles: this peer does, and only its own loopback server's
entries are read here.
"""

import pickle
from collections.abc import Callable

import redis

from benchmarks.transport.round import Ends, MicroBatches, Round
from benchmarks.transport.workload import as_lists, as_record, ended_trajectories, to_arrays

MAX_ENTRIES = 1_000_000
BLOCK_MS = 100


def produce(asked: Round, started: Callable[[], None]) -> Ends:
    """Publish the round."""
    pool = [as_lists(ended) for ended in ended_trajectories(asked.tokens, asked.seed)]
    with _connected(asked) as client:
        started()
        ends = Ends(asked)
        for index in ends:
            data = pickle.dumps(as_record(pool[index % len(pool)], index))
            client.xadd(asked.stream, {"index": index, "data": data}, maxlen=MAX_ENTRIES, approximate=True)
    return ends


def consume(asked: Round, started: Callable[[], None]) -> MicroBatches:
    """Read the round, one entry per request."""
    batches = MicroBatches()
    last_id: bytes | int = 0
    with _connected(asked) as client:
        started()
        while len(batches.entered) < asked.count:
            response = client.xread({asked.stream: last_id}, count=1, block=BLOCK_MS)
            if not response:
                continue
            ((_, ((last_id, entry),)),) = response
            record = pickle.loads(entry[b"data"])  # noqa: S301 — see above
            batches.add(int(entry[b"index"]), to_arrays(record), record["output_tokens"])
    return batches


def _connected(asked: Round) -> "redis.Redis":
    host, _, port = asked.address.partition(":")
    client = redis.Redis(host=host, port=int(port))
    client.ping()
    return client
