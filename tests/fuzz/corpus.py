"""Inputs to begin from: golden files as frames, and batches of every compression around them."""

from pathlib import Path

from tests.contract.test_golden_bytes import GOLDEN, headers_of
from tests.fuzz.bombs import CODECS, batch
from tests.fuzz.targets import SCHEMAS


def seeds() -> dict[str, list[bytes]]:
    """By target."""
    frames = [(dict(headers_of(path))["schema"].decode(), path.read_bytes()) for path in sorted(GOLDEN.glob("*.bin"))]
    values = [value for _, value in frames]
    plain = [batch(value, headers=[("schema", b"x"), ("", None)]) for value in values]
    packed = [batch(*values[:4], codec=codec) for codec in CODECS.values()]
    return {
        "codec": [bytes([SCHEMAS.index(schema)]) + value for schema, value in frames],
        "headers": [b"schema\0trajectory\0schema-version\0" + b"1\0content-type\0x", b"unreadable\0why"],
        "batches": [*plain, *packed, b"".join((plain[0], packed[0], plain[1]))],
        "decompression": [bytes([codec]) + batch(*values[:4], codec=codec)[61:] for codec in CODECS.values()],
    }


def write(folder: Path, target: str) -> None:
    """As files, for a fuzzer."""
    folder.mkdir(parents=True, exist_ok=True)
    for number, data in enumerate(seeds()[target]):
        (folder / f"{number:03}").write_bytes(data)
