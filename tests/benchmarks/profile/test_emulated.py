from benchmarks.profile.emulated import finishes
from benchmarks.profile.workload import Trace
from streamrl.schemas.profiles import DecodeSettings


def test_a_batch_on_the_timeline_takes_what_its_curve_says() -> None:
    decode = DecodeSettings(table=((1, 0.01), (2, 0.03)), prefill_s_per_token=0.001)
    # both run for 5 steps of 30 ms after 30 ms of prefill, then the longer one alone for 5 steps of 10 ms
    assert finishes(decode, 2, [(10, 5), (20, 10)]) == [0.03 + 0.15, 0.03 + 0.15 + 0.05]


def test_the_trace_is_the_same_for_a_seed_and_has_a_heavy_tail() -> None:
    sizes = Trace(requests=400).sizes()
    assert sizes == Trace(requests=400).sizes()
    lengths = sorted(length for _, length in sizes)
    assert 60 < lengths[200] < 100
    assert lengths[-4] > 4 * lengths[200]
    assert lengths[-1] <= 640
