import hashlib
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from streamrl.schemas import weight_deltas
from streamrl.schemas.errors import WeightsError
from streamrl.schemas.weight_deltas import apply_deltas, write_delta


def after(path: Path, contents: list[bytes], unit: int) -> bytes:
    """What the first of the files becomes by the differences between all of them."""
    for index, content in enumerate(contents):
        (path / f"{index}").write_bytes(content)
    deltas = []
    for index in range(1, len(contents)):
        deltas.append(path / f"{index}.delta")
        assert write_delta(path / f"{index - 1}", path / f"{index}", unit, deltas[-1])
    sha256 = apply_deltas(path / "0", deltas, path / "made")
    assert sha256 == hashlib.sha256((path / "made").read_bytes()).hexdigest()
    return (path / "made").read_bytes()


@given(data=st.data(), size=st.integers(0, 700), unit=st.sampled_from([1, 2, 4, 8]), count=st.integers(2, 4))
@settings(max_examples=60, deadline=None)
def test_applying_deltas_gives_the_newer_file(
    tmp_path_factory: pytest.TempPathFactory, data: st.DataObject, size: int, unit: int, count: int
) -> None:
    """Few bytes changed or all of them, in blocks that are smaller than the files, of any length."""
    chance = np.random.default_rng(data.draw(st.integers(0, 1 << 30)))
    contents = [chance.bytes(size)]
    for _ in range(1, count):
        new = np.frombuffer(contents[-1], dtype=np.uint8).copy()
        share = data.draw(st.sampled_from([0.0, 0.01, 0.1, 1.0]))
        changed = chance.random(size) < share
        new[changed] = chance.integers(0, 256, int(changed.sum()), dtype=np.uint8)
        contents.append(new.tobytes())
    before, weight_deltas.BLOCK_BYTES = weight_deltas.BLOCK_BYTES, 256
    try:
        assert after(tmp_path_factory.mktemp("delta"), contents, unit) == contents[-1]
    finally:
        weight_deltas.BLOCK_BYTES = before


def test_a_step_in_bfloat16_takes_a_few_percent(tmp_path: Path) -> None:
    chance = np.random.default_rng(0)
    old = chance.normal(0, 0.05, 500_000).astype("<f4")
    new = old + chance.choice([-1e-6, 1e-6], old.size).astype("<f4")
    contents = [(weights.view("<u4") >> 16).astype("<u2").tobytes() for weights in (old, new)]
    assert after(tmp_path, contents, 2) == contents[1]
    assert (tmp_path / "1.delta").stat().st_size < 0.03 * len(contents[0])


def test_one_that_saves_too_little_is_not_kept(tmp_path: Path) -> None:
    chance = np.random.default_rng(0)
    for name in "ab":
        (tmp_path / name).write_bytes(chance.bytes(10_000))
    assert not write_delta(tmp_path / "a", tmp_path / "b", 2, tmp_path / "d", limit=5000)
    assert not (tmp_path / "d").exists()
    (tmp_path / "c").write_bytes(b"short")
    with pytest.raises(ValueError, match="equal size"):
        write_delta(tmp_path / "a", tmp_path / "c", 2, tmp_path / "d")


@pytest.mark.parametrize("damage", ["cut", "longer", "kind", "size", "magic", "packed"])
def test_a_damaged_one_is_refused(tmp_path: Path, damage: str) -> None:
    old, new = np.arange(5000, dtype="<u2"), np.arange(5000, dtype="<u2")
    new[::50] += 1
    for name, content in (("a", old), ("b", new)):
        (tmp_path / name).write_bytes(content.tobytes())
    write_delta(tmp_path / "a", tmp_path / "b", 2, tmp_path / "d")
    data = bytearray((tmp_path / "d").read_bytes())
    match damage:
        case "cut":
            del data[-1]
        case "longer":
            data += b"?"
        case "kind":
            data[17] = 9
        case "size":
            data[9] ^= 1
        case "magic":
            data[0] ^= 1
        case "packed":
            data[40] ^= 0xFF
    (tmp_path / "d").write_bytes(data)
    with pytest.raises(WeightsError, match="expected"):
        made = apply_deltas(tmp_path / "a", [tmp_path / "d"], tmp_path / "c")
        # zstd checks nothing here: a byte of its content may be another without a complaint, and the sum says so.
        assert made != hashlib.sha256(new.tobytes()).hexdigest()
        raise WeightsError("expected other bytes")


def test_an_unchanged_block_that_promises_bytes_is_damaged(tmp_path: Path) -> None:
    content = np.arange(50, dtype="<u2").tobytes()
    (tmp_path / "a").write_bytes(content)
    block = weight_deltas._BLOCK.pack(weight_deltas.UNCHANGED, 0, 5)
    (tmp_path / "d").write_bytes(weight_deltas._HEADER.pack(weight_deltas.MAGIC, 2, len(content)) + block)
    with pytest.raises(WeightsError, match="damaged"):
        apply_deltas(tmp_path / "a", [tmp_path / "d"], tmp_path / "c")
