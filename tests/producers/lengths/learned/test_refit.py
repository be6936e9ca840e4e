import threading

from producers.lengths.learned.model import Refitter


def test_the_caller_goes_on_while_a_fit_is_under_way() -> None:
    refitter, go_on, done = Refitter(), threading.Event(), threading.Event()

    def fit() -> None:
        go_on.wait(5)
        done.set()

    refitter.start(fit)
    assert refitter.is_busy
    assert not done.is_set()
    go_on.set()
    refitter.wait()
    assert done.is_set()
    assert not refitter.is_busy


def test_a_fit_that_fails_is_counted_and_the_next_one_runs() -> None:
    refitter, done = Refitter(), threading.Event()

    def fails() -> None:
        raise RuntimeError("no memory")

    refitter.start(fails)
    refitter.wait()
    refitter.start(done.set)
    refitter.wait()
    assert (refitter.failures, done.is_set()) == (1, True)
