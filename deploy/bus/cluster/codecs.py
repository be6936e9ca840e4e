"""Whether the compression codecs of this machine work: a batch is written and read as publishers and readers do."""

from deploy.bus.client.batches import append, new_builder
from deploy.bus.client.record_batches import SafeRecords
from schemas.ports.bus import Outgoing

CODECS = ("none", "gzip", "snappy", "lz4", "zstd")
_SAMPLE = Outgoing("t", bytes(range(256)) * 64, "key", headers=(("name", b"content"),))


def codec_problem(compression_type: str) -> str | None:
    """Compress a record and read it back; why that did not work, or none."""
    try:
        builder = new_builder(1 << 20, compression_type)
        append(builder, _SAMPLE)
        builder.close()
        batch = SafeRecords(bytes(builder._build())).next_batch()  # noqa: SLF001
    except (AssertionError, RuntimeError, ImportError) as error:
        return f"{type(error).__name__}: {error}"
    records = [] if batch is None else list(batch)
    if [(each.key, each.value, tuple(each.headers)) for each in records] != [(b"key", _SAMPLE.value, _SAMPLE.headers)]:
        return "what was read back differs from what was written"
    return None
