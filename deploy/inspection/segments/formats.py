"""Records ↔ one segment file, byte-exact. Knows neither manifests nor runs.

Parquet segments carry, for people and query engines, a few readable columns beside the bytes; only the bytes are read
back.
"""

import base64
import json
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

from deploy.inspection.segments.manifest import Format
from schemas.errors import WireError
from schemas.messages.trajectories import Trajectory
from schemas.ports.bus import Record

READABLE = ("trajectory_id", "group_id", "worker_id", "prompt_text", "completion_text", "rewards", "admitted_version")


def write_segment(path: Path, records: Sequence[Record], encoding: Format, *, readable: bool) -> None:
    """Write records in their order. ``readable``: add columns that show trajectories, null where none is."""
    if encoding == "jsonl":
        path.write_text("".join(_line(record) for record in records))
    else:
        _write_parquet(path, records, readable=readable)


def read_segment(path: Path, topic: str, encoding: Format) -> list[Record]:
    """The records of a segment.

    Raises:
        OSError: the file cannot be read.
        ValueError: it is not a segment.
    """
    if encoding == "jsonl":
        return [_from_line(topic, line) for line in path.read_text().splitlines()]
    return _read_parquet(path, topic)


def _line(record: Record) -> str:
    fields = {
        "partition": record.partition,
        "offset": record.offset,
        "timestamp": record.timestamp,
        "key": record.key,
        "headers": [[name, _packed(content)] for name, content in record.headers],
        "value": _packed(record.value),
    }
    return json.dumps(fields) + "\n"


def _from_line(topic: str, line: str) -> Record:
    fields = json.loads(line)
    try:
        headers = tuple((name, _unpacked(content)) for name, content in fields["headers"])
        return Record(
            topic,
            fields["partition"],
            fields["offset"],
            fields["key"],
            _unpacked(fields["value"]),
            headers,  # type: ignore[arg-type]  # Kafka allows a header without content
            fields["timestamp"],
        )
    except (KeyError, TypeError) as error:
        raise ValueError(f"expected a record, got a line that lacks {error}") from error


def _packed(content: bytes | None) -> str | None:
    return None if content is None else base64.b64encode(content).decode()


def _unpacked(text: str | None) -> bytes | None:
    return None if text is None else base64.b64decode(text, validate=True)


def _write_parquet(path: Path, records: Sequence[Record], *, readable: bool) -> None:
    import pyarrow as pa
    import pyarrow.parquet as pq

    header = pa.struct([("name", pa.string()), ("content", pa.binary())])
    columns: dict[str, Any] = {
        "partition": pa.array([record.partition for record in records], pa.int32()),
        "offset": pa.array([record.offset for record in records], pa.int64()),
        "timestamp": pa.array([record.timestamp for record in records], pa.float64()),
        "key": pa.array([record.key for record in records], pa.string()),
        "headers": pa.array([_named(record.headers) for record in records], pa.list_(header)),
        "value": pa.array([record.value for record in records], pa.large_binary()),
    }
    if readable:
        rows = [_readable(record) for record in records]
        columns |= {name: pa.array([row.get(name) for row in rows], pa.string()) for name in READABLE}
    pq.write_table(pa.table(columns), path, compression="zstd")


def _named(headers: Iterable[tuple[str, bytes]]) -> list[dict[str, Any]]:
    return [{"name": name, "content": content} for name, content in headers]


def _readable(record: Record) -> dict[str, str]:
    try:
        message = record.message()
    except WireError:
        return {}
    if not isinstance(message, Trajectory):
        return {}
    shown = {name: str(getattr(message, name)) for name in READABLE}
    return shown | {"rewards": json.dumps(message.rewards)}


def _read_parquet(path: Path, topic: str) -> list[Record]:
    import pyarrow.parquet as pq

    names = ["partition", "offset", "timestamp", "key", "headers", "value"]
    columns = [column.to_pylist() for column in pq.read_table(path, columns=names).select(names).columns]
    return [
        Record(topic, partition, offset, key, value, tuple((h["name"], h["content"]) for h in headers), timestamp)
        for partition, offset, timestamp, key, headers, value in zip(*columns, strict=True)
    ]
