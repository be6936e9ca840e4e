"""Small bytes that become large, each in the shape of one target's input."""

import struct
from collections.abc import Callable
from functools import partial

import msgpack
import numpy as np
from aiokafka.record.default_records import DefaultRecordBatchBuilder

from streamrl.schemas.codec import encode
from tests.fuzz.targets import SCHEMAS
from tests.schemas.examples import examples, trajectory

MIB = 1 << 20
LARGEST_HEADER = 8 * MIB
BEHIND_THE_HEADER = ("prompt_token_ids", "token_ids", "logprobs", "loss_mask", "prompt_text", "completion_text")
CODECS = {"gzip": 1, "snappy": 2, "lz4": 3, "zstd": 4}


def frame(schema: str, header: bytes, arrays: bytes = b"") -> bytes:
    """Input of the ``codec`` target."""
    return b"".join((bytes([SCHEMAS.index(schema)]), struct.pack("<I", len(header)), header, arrays))


def _array(count: int) -> bytes:
    return b"\xdd" + struct.pack(">I", count)


def _field(name: str, value: bytes, among: dict[str, object] | None = None) -> bytes:
    """A header map with one field more, packed already."""
    fields = among or {}
    body = b"".join(msgpack.packb(key) + msgpack.packb(plain) for key, plain in fields.items())
    named: bytes = msgpack.packb(name)
    return b"\xdf" + struct.pack(">I", len(fields) + 1) + body + named + value


def _fields_of(example: str) -> dict[str, object]:
    value = encode(examples()[example])
    (size,) = struct.unpack_from("<I", value)
    fields: dict[str, object] = msgpack.unpackb(value[4 : 4 + size])
    return fields


def _inner_last(levels: int, per_level: int, item: bytes) -> bytes:
    """Lists whose last item is the next list, so that none is complete before the last one is."""
    return b"".join(_array(per_level + 1) + item * per_level for _ in range(levels)) + b"\x90"


def _trajectory_with_spans(spans: bytes) -> bytes:
    fields = _fields_of("trajectory")
    del fields["version_spans"]
    return frame("trajectory", _field("version_spans", spans, fields | dict.fromkeys(BEHIND_THE_HEADER, 0)))


def _trajectory_with_text(text: bytes, *, claimed: int | None = None, tokens: int = 0) -> bytes:
    value = encode(trajectory(tokens, prompt_text="", completion_text=""))
    (size,) = struct.unpack_from("<I", value)
    fields = msgpack.unpackb(value[4 : 4 + size]) | {"completion_text": len(text) if claimed is None else claimed}
    return frame("trajectory", msgpack.packb(fields), value[4 + size :] + text)


def _report_with(name: str, value: bytes) -> bytes:
    fields = _fields_of("step-report")
    del fields[name]
    return frame("step-report", _field(name, value, fields))


def _map(count: int, value: bytes) -> bytes:
    entries = b"".join(b"\xa6" + b"%06x" % n + value for n in range(count))
    return b"\xdf" + struct.pack(">I", count) + entries


def _long_trajectory(**arrays: np.ndarray) -> bytes:
    value = encode(trajectory(1_800_000, prompt_text="", completion_text=""))
    (size,) = struct.unpack_from("<I", value)
    body = bytearray(value[4 + size :])
    body[-1_800_000 * 5 : -1_800_000] = arrays["logprobs"].tobytes()
    return frame("trajectory", value[4 : 4 + size], bytes(body))


CODEC_BOMBS: dict[str, Callable[[], bytes]] = {
    "nested-lists": lambda: frame("trajectory", b"\x91" * (512 << 10)),
    "nested-maps": lambda: frame("trajectory", b"\x81\xa1x" * (170 << 10)),
    "empty-lists": lambda: frame("trajectory", _field("x", _array(500_000) + b"\x90" * 500_000)),
    "empty-maps-in-a-report": lambda: frame("step-report", _field("x", _array(8_000_000) + b"\x80" * 8_000_000)),
    "short-texts-inner-last": lambda: frame("step-report", _field("x", _inner_last(70, 38_000, b"\xa2ab"))),
    "lists-of-a-billion": lambda: frame("step-report", _field("x", _array(2**31 - 1) * 500)),
    "lists-that-just-fit": lambda: frame("step-report", _field("x", _array(115_000) * 500 + bytes(2 * MIB))),
    "many-wrong-spans": lambda: _trajectory_with_spans(_array(500_000) + b"\xc0" * 500_000),
    "as-many-wrong-spans-as-allowed": lambda: _trajectory_with_spans(_array(19_000) + b"\xc0" * 19_000),
    "as-many-wrong-groups-as-allowed": lambda: _report_with("group_ids", _array(115_000) + b"\xc0" * 115_000),
    "as-many-wrong-batches-as-allowed": lambda: _report_with("micro_batches", _array(58_000) + b"\x91\xc0" * 58_000),
    "as-many-wrong-metrics-as-allowed": lambda: _report_with("metrics", _map(55_000, b"\xc0")),
    "duplicate-keys": lambda: frame("step-report", b"\xdf" + struct.pack(">I", 55_000) + b"\xa1x\x90" * 55_000),
    "wide-text-behind-the-header": lambda: _trajectory_with_text(b"a" * (8 * MIB) + "🙂".encode()),
    "wide-text-that-is-not-utf8": lambda: _trajectory_with_text(b"a" * (8 * MIB - 9) + "🙂".encode() + b"\xff" * 5),
    "text-of-a-billion-bytes": lambda: _trajectory_with_text(b"a" * MIB, claimed=2**30),
    "as-much-wide-text-as-allowed": lambda: _trajectory_with_text(b"a" * (8 * MIB - 4) + "🙂".encode(), tokens=850_000),
    "wide-text": lambda: frame("step-report", _field("problem", msgpack.packb("a" * (7 * MIB) + "🙂"))),
    "large-binary": lambda: frame("step-report", _field("x", msgpack.packb(bytes(7 * MIB)))),
    "not-a-number": lambda: _long_trajectory(logprobs=np.full(1_800_000, np.nan, np.float32)),
    "all-valid-and-large": lambda: _long_trajectory(logprobs=np.zeros(1_800_000, np.float32)),
}


def batch(*values: bytes | None, codec: int = 0, headers: list[tuple[str, bytes | None]] | None = None) -> bytes:
    """A record batch as a broker sends it."""
    builder = DefaultRecordBatchBuilder(
        magic=2,
        compression_type=codec,
        is_transactional=False,
        producer_id=-1,
        producer_epoch=-1,
        base_sequence=-1,
        batch_size=1 << 30,
    )
    for offset, value in enumerate(values):
        builder.append(offset, 1_795_000_000_000, None, value, headers or [])
    return bytes(builder.build())


def based_at(offset: int, data: bytes) -> bytes:
    """The same batch at another offset; the checksum does not cover it."""
    return struct.pack(">q", offset) + data[8:]


def _many(data: bytes, count: int) -> bytes:
    return b"".join(based_at(n, data) for n in range(count))


def _zeros(size: int, codec: int) -> bytes:
    return batch(bytes(size), codec=codec)


BATCH_BOMBS: dict[str, Callable[[], bytes]] = {
    **{f"{name}-128-mib": partial(_zeros, 128 * MIB, codec) for name, codec in CODECS.items()},
    "zstd-just-allowed": lambda: batch(bytes(19 * MIB), codec=4),
    "zstd-many-just-allowed": lambda: _many(batch(bytes(15 * MIB), codec=4), 200),
    "many-headers": lambda: batch(b"x", headers=[("", None)] * 500_000),
    "many-headers-in-many-records": lambda: batch(*[b"x"] * 2000, headers=[("", None)] * 250),
    "very-many-headers": lambda: batch(b"x", headers=[("", None)] * 2_000_000),
    "very-many-headers-compressed": lambda: batch(b"x", codec=4, headers=[("", None)] * 2_000_000),
    "many-tiny-records": lambda: batch(*[None] * 140_000),
    "very-many-tiny-records-compressed": lambda: batch(*[None] * 1_000_000, codec=4),
}
