from observability.run_state.aggregates import FATES_KEPT, Fates


def test_ages_are_told_of_those_that_were_seen() -> None:
    fates = Fates()
    fates.arrived((0, 1), 4)
    fates.arrived((0, 2), 6)
    assert list(fates.trained([(0, 1), (0, 2), (9, 9)], step=8, base=7)) == [3, 1]
    assert fates.of((0, 1)) == "trained in step 8"
    assert fates.of((5, 5)) == "waiting"
    assert fates.of((5, 5), over=True) == "left over"
    assert fates.of((0, 1), over=True) == "trained in step 8"


def test_the_oldest_are_forgotten() -> None:
    fates = Fates()
    for offset in range(FATES_KEPT + 50):
        fates.arrived((0, offset), 1)
        fates.tell((0, offset), "skipped: stale")
    assert len(fates.oldest) == len(fates.told) == FATES_KEPT
    assert fates.of((0, 0)) == "waiting"
