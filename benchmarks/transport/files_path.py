"""The peer's path through JSON lines, as the file backend of PipelineRL does it (its ``streams.py``, at 58d3934).

One record per line, flushed at once; the reader remembers its place after every line and, at the end of the file,
goes back to it and sleeps for a tenth of a second.
"""

import json
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, TextIO

import orjson

from benchmarks.transport.round import Ends, MicroBatches, Round
from benchmarks.transport.workload import as_lists, as_record, ended_trajectories, to_arrays

REREAD_DELAY_S = 0.1


def produce(asked: Round, started: Callable[[], None]) -> Ends:
    """Write the round."""
    pool = [as_lists(ended) for ended in ended_trajectories(asked.tokens, asked.seed)]
    with _file(asked).open("a") as out:
        started()
        ends = Ends(asked)
        for index in ends:
            record = as_record(pool[index % len(pool)], index)
            out.write(orjson.dumps(record, option=orjson.OPT_SERIALIZE_NUMPY).decode("utf-8"))
            out.write("\n")
            out.flush()
    return ends


def consume(asked: Round, started: Callable[[], None]) -> MicroBatches:
    """Read the round, line by line."""
    batches = MicroBatches()
    with _file(asked).open() as lines:
        started()
        for index, record in enumerate(_records(lines)):
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


def _file(asked: Round) -> Path:
    return Path(asked.address) / f"{asked.stream}.jsonl"
