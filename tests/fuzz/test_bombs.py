import json
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from tests.fuzz.bombs import BATCH_BOMBS, CODEC_BOMBS

MOST_GROWTH_KIB = 64 << 10
ROOT = Path(__file__).parents[2]


def explode(folder: Path, target: str, bombs: dict[str, Callable[[], bytes]]) -> dict[str, dict[str, Any]]:
    """Try each in a child process, which has nothing else in memory."""
    for name, make in bombs.items():
        (folder / f"{target}.{name}").write_bytes(make())
    command = [sys.executable, "-m", "tests.fuzz.targets", str(folder)]
    child = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=110, check=False)
    assert child.returncode == 0, child.stderr[-2000:]
    results = [json.loads(line) for line in child.stdout.splitlines()]
    print(
        "\n" + "\n".join(f"{each['growth_kib'] / 1024:6.1f} MiB {each['bomb']}: {each['outcome']}" for each in results)
    )
    return {each["bomb"].removeprefix(f"{target}."): each for each in results}


@pytest.mark.processes
def test_no_frame_takes_more_than_64_mib_to_decode(tmp_path: Path) -> None:
    results = explode(tmp_path, "codec", CODEC_BOMBS)
    assert {name for name, each in results.items() if each["growth_kib"] > MOST_GROWTH_KIB} == set()
    assert {name for name, each in results.items() if each["outcome"] == "a message"} == {
        "all-valid-and-large",
        "as-much-wide-text-as-allowed",
    }


@pytest.mark.processes
def test_no_fetched_batch_takes_more_than_64_mib_to_read(tmp_path: Path) -> None:
    results = explode(tmp_path, "batches", BATCH_BOMBS)
    assert {name for name, each in results.items() if each["growth_kib"] > MOST_GROWTH_KIB} == set()
    refused = {name for name, each in results.items() if each["outcome"] == "1 records, 1 of them unreadable"}
    assert refused == {
        *(f"{codec}-128-mib" for codec in ("gzip", "snappy", "lz4", "zstd")),
        "many-headers",
        "very-many-headers",
        "very-many-headers-compressed",
    }
    assert results["zstd-just-allowed"]["outcome"] == "1 records, 0 of them unreadable"
    assert results["zstd-many-just-allowed"]["outcome"] == "1 records, 0 of them unreadable"
