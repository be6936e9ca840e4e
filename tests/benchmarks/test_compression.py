import numpy as np
import pytest

from benchmarks.compression.__main__ import CODECS, both_sides, read, sampled_logprobs, through_a_broker, write
from streamrl.schemas.trajectories import Trajectory
from tests.consumers.factories import trajectory


def pool(tokens: int, count: int) -> list[Trajectory]:
    random = np.random.default_rng(0)
    return [
        trajectory(
            f"d/{index}/0",
            tokens=tokens,
            token_ids=random.integers(0, 1000, tokens, dtype=np.int32),
            logprobs=sampled_logprobs(random, tokens),
            completion_text="some words " * (tokens // 3),
        )
        for index in range(count)
    ]


def test_made_up_log_probabilities_are_those_of_a_sampler_that_is_mostly_certain() -> None:
    found = sampled_logprobs(np.random.default_rng(0), 20_000)
    assert found.dtype == np.float32
    assert found.shape == (20_000,)
    assert np.isfinite(found).all()
    assert found.max() <= 0
    assert -0.6 < found.mean() < -0.2
    assert 0.3 < (found > -1e-3).mean() < 0.7
    assert np.percentile(found, 5) < -1


@pytest.mark.parametrize("codec", CODECS)
def test_batches_hold_what_was_written_alone_and_together(codec: str) -> None:
    written = pool(300, 6)
    assert [len(write(written, codec, most)) for most in (1, 4, 6)] == [6, 2, 1]
    read(write(written, codec, 6))
    # 512 KiB of frames of 80 kB each, whatever they are compressed to.
    assert len(write(pool(6_000, 12), codec, 12)) == 2


def test_every_codec_has_its_bytes_and_times_and_compresses() -> None:
    found = both_sides(pool(300, 6), 1)
    assert set(found) == set(CODECS)
    for codec, row in found.items():
        assert row["write_us_alone"] > 0 < row["read_us_batched"]
        assert (row["ratio_alone"] > 1.2) == (codec != "none")


async def test_every_codec_goes_through_a_broker(bootstrap_servers: str) -> None:
    rates = await through_a_broker(bootstrap_servers, {50: pool(50, 3)}, 1, 500)
    assert set(rates) == {(codec, 50) for codec in CODECS}
    assert all(rate > 0 for row in rates.values() for rate in row.values())
