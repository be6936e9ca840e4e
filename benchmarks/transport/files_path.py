"""The peer's path through JSON lines, as the file backend of PipelineRL does it (its ``streams.py``, at 58d3934).

One record per line. *single*, as it comes: each is flushed at once; the reader remembers its place after every line
and, at the end of the file, goes back to it and sleeps for a tenth of a second. *batched*: flushed in batches as our
publisher cuts them, and the reader takes as many bytes of lines at once.
"""

import json
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, TextIO

import orjson

from benchmarks.transport.round import BATCH_BYTES, LINGER_S, Ends, MicroBatches, Round
from benchmarks.transport.workload import as_lists, as_record, ended_trajectories, to_arrays

REREAD_DELAY_S = 0.1


def produce(asked: Round, started: Callable[[], None]) -> Ends:
    """Write the round."""
    pool = [as_lists(ended) for ended in ended_trajectories(asked.tokens, asked.seed)]
    with _file(asked).open("a") as out:
        started()
        ends = Ends(asked, before_waiting=out.flush)
        held, since = 0, time.monotonic()
        for index in ends:
            record = as_record(pool[index % len(pool)], index)
            line = orjson.dumps(record, option=orjson.OPT_SERIALIZE_NUMPY).decode("utf-8")
            out.write(line)
            out.write("\n")
            held += len(line)
            if asked.batching == "single" or held >= BATCH_BYTES or time.monotonic() - since >= LINGER_S:
                out.flush()
                held, since = 0, time.monotonic()
    return ends


def consume(asked: Round, started: Callable[[], None]) -> MicroBatches:
    """Read the round, line by line."""
    batches = MicroBatches()
    with _file(asked).open() as lines:
        started()
        records = _records(lines) if asked.batching == "single" else _records_of_batches(lines)
        for index, record in enumerate(records):
            batches.add(index, to_arrays(record), record["output_tokens"])
            if index + 1 == asked.count:
                break
    return batches


def _records(lines: TextIO) -> Iterator[dict[str, Any]]:
    place = lines.tell()
    while True:
        line = lines.readline()
        if line.endswith("\n"):
            yield json.loads(line)
            place = lines.tell()
        else:
            lines.seek(place)
            time.sleep(REREAD_DELAY_S)


def _records_of_batches(lines: TextIO) -> Iterator[dict[str, Any]]:
    begun = ""
    while True:
        batch = lines.readlines(BATCH_BYTES)
        for line in batch:
            begun += line
            if begun.endswith("\n"):
                yield json.loads(begun)
                begun = ""
        if not batch:
            time.sleep(REREAD_DELAY_S)


def _file(asked: Round) -> Path:
    return Path(asked.address) / f"{asked.stream}.jsonl"
