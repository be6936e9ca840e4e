import pytest

from streamrl.producers.generation.pace import CHUNK_TOKENS, pace_of
from streamrl.schemas.settings import LoopSettings


@pytest.mark.parametrize("timeout_s", [0.4, 8.0, 600.0])
def test_a_worker_reports_often_and_fences_before_it_counts_as_lost(timeout_s: float) -> None:
    pace = pace_of(LoopSettings(heartbeat_timeout_s=timeout_s))
    assert 8 * pace.heartbeat_interval_s <= timeout_s
    assert pace.fencing_timeout_s < timeout_s
    assert pace.heartbeat_interval_s <= 1.0
    assert pace.fencing_timeout_s <= 5.0


@pytest.mark.parametrize(("longest", "chunk"), [(1, 1), (64, 4), (1024, 64), (32_768, 256)])
def test_a_lost_worker_costs_a_small_part_of_a_completion(longest: int, chunk: int) -> None:
    pace = pace_of(LoopSettings(max_completion_length=longest))
    assert pace.partial_chunk_tokens == chunk
    assert pace.durable_chunk_tokens == min(CHUNK_TOKENS, chunk)
