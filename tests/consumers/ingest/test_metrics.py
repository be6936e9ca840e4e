from streamrl.bus.port import TopicPartition
from streamrl.consumers.ingest.metrics import IngestMetrics
from tests.consumers.factories import trajectory
from tests.consumers.ingest.reader_harness import LOOP


def test_rates_and_latency_are_of_the_time_since_the_last_summary() -> None:
    now = [100.0]
    measures = IngestMetrics(LOOP, lambda: now[0], lambda: now[0])
    lag = {TopicPartition("t", number): number for number in range(4)}
    counts = {"lag": lag, "finished": {tp: 10 * count for tp, count in lag.items()}}
    for number in range(10):
        measures.observe_record(50)
        measures.observe_trajectory(trajectory(created_at=99.0 - number % 2))
    now[0] += 2.0
    first = measures.summary(**counts, pending_bytes=7, skipped={"stale": 2, "orphan_lineage": 1}, dead_letters=3)
    assert (first["kafka/records_per_s"], first["kafka/bytes_per_s"]) == (5.0, 250.0)
    assert first["kafka/ingest_latency_s"] == 1.5
    assert (first["kafka/lag/bucket_0"], first["kafka/lag/bucket_1"]) == (1.0, 5.0)
    assert (first["kafka/finished/bucket_0"], first["kafka/finished/bucket_1"]) == (10.0, 50.0)
    assert (first["kafka/pending_bytes"], first["kafka/dead_letters"], first["off_policy/dropped"]) == (7.0, 3.0, 3.0)
    assert (first["ledger/skipped/stale"], first["ledger/skipped/orphan_lineage"]) == (2.0, 1.0)
    now[0] += 2.0
    second = measures.summary(**counts, pending_bytes=0, skipped={}, dead_letters=3)
    assert (second["kafka/records_per_s"], second["kafka/ingest_latency_s"]) == (0.0, 0.0)
