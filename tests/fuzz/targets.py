"""What may be done with bytes from strangers, and the only ways in which it may end.

``python -m tests.fuzz.targets FOLDER`` tries every file of a folder and prints how it ended and the growth of memory.
"""

import gc
import json
import os
import sys
from pathlib import Path

from aiokafka.errors import CorruptRecordException

from streamrl.bus.kafka.records import SafeRecords, Undecodable, decompressed
from streamrl.schemas.codec import _KINDS, UNREADABLE_HEADER, decode
from streamrl.schemas.errors import WireError
from streamrl.schemas.messages import Message

SCHEMAS = sorted(_KINDS)


def codec(data: bytes) -> str:
    """The first byte chooses the schema."""
    schema = SCHEMAS[data[0] % len(SCHEMAS)] if data else SCHEMAS[0]
    try:
        message = decode(data[1:], (("schema", schema.encode()), ("schema-version", b"1")))
    except WireError as error:
        return f"{type(error).__name__}: {str(error)[:80]}"
    assert isinstance(message, Message)
    return "a message"


def headers(data: bytes) -> str:
    """Pieces between zero bytes are names and values in turn."""
    pieces = data.split(b"\0")
    named = tuple(
        (name.decode(errors="replace"), value) for name, value in zip(pieces[::2], pieces[1::2], strict=False)
    )
    try:
        decode(data, named)
    except WireError as error:
        return type(error).__name__
    return "a message"


def batches(data: bytes) -> str:
    """Fetched bytes of a partition: every record is readable or says why not; offsets never fall within a batch."""
    delivered = unreadable = 0
    for _ in range(len(data) // 12 + 2):  # each batch with damage not seen before is asked for again, once
        try:
            delivered = unreadable = 0
            records = SafeRecords(data)
            while records.has_next():
                batch = records.next_batch()
                assert batch is not None
                assert batch.validate_crc()
                for record in batch:
                    delivered += 1
                    unreadable += record.value is None and UNREADABLE_HEADER in dict(record.headers)
                    if delivered > 50_000:
                        return "many records"
        except CorruptRecordException:
            continue
        break
    else:
        raise AssertionError("damage raised twice")
    return f"{delivered} records, {unreadable} of them unreadable"


def decompression(data: bytes) -> str:
    """The first byte chooses the codec."""
    try:
        return f"{len(decompressed(data[0] % 8 if data else 0, data[1:], 1 << 20))} bytes"
    except Undecodable as error:
        return str(error)[:80]


TARGETS = {"codec": codec, "headers": headers, "batches": batches, "decompression": decompression}


def memory_kib(field: str) -> int:
    """``VmRSS`` or ``VmHWM`` of this process."""
    lines = Path("/proc/self/status").read_text().splitlines()
    return next(int(line.split()[1]) for line in lines if line.startswith(field))


def forget_peak() -> None:
    """Let ``VmHWM`` begin again at what is held now."""
    gc.collect()
    Path("/proc/self/clear_refs").write_text("5")


def measure(path: Path) -> None:
    """A line of JSON about the file, which is named ``target.what``."""
    target = TARGETS[path.name.split(".")[0]]
    target(b"")
    data = path.read_bytes()
    forget_peak()
    before = memory_kib("VmRSS")
    outcome = target(data)
    growth = memory_kib("VmHWM") - before
    print(json.dumps({"bomb": path.name, "bytes": len(data), "growth_kib": growth, "outcome": outcome}), flush=True)


def measure_all(folder: Path) -> int:
    """Each in a process of its own, forked from this one, which has freed nothing that could be used again."""
    problems = 0
    for path in sorted(folder.iterdir()):
        if (child := os.fork()) == 0:
            measure(path)
            os._exit(0)
        problems += os.waitpid(child, 0)[1] != 0
    return problems


if __name__ == "__main__":
    sys.exit(measure_all(Path(sys.argv[1])))
