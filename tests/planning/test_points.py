from streamrl.planning.measuring import uneven
from streamrl.planning.profiler import batches, levels


def test_batches_double_up_to_the_largest() -> None:
    assert batches(1) == [1]
    assert batches(16) == [1, 2, 4, 8, 16]
    assert batches(20) == [1, 2, 4, 8, 16, 20]


def test_levels_reach_from_the_shortest_to_the_longest() -> None:
    assert levels(8, 8000, 4) == [8, 80, 800, 8000]
    assert levels(8, 5, 4) == [5]
    assert levels(8, 8000, 1) == [8]


def test_contexts_of_a_batch_differ_as_a_runs_do() -> None:
    assert uneven(800, 1) == [800]
    assert uneven(800, 4) == [800, 400, 200, 100]
    assert min(uneven(3, 16)) == 1
