import threading

from streamrl.producers.lengths.learned.model_updates import BackgroundFit


def test_the_caller_goes_on_while_a_fit_is_under_way() -> None:
    fitting, go_on, done = BackgroundFit(), threading.Event(), threading.Event()

    def fit() -> None:
        go_on.wait(5)
        done.set()

    fitting.start(fit)
    assert fitting.is_busy
    assert not done.is_set()
    go_on.set()
    fitting.wait()
    assert done.is_set()
    assert not fitting.is_busy


def test_a_fit_that_fails_is_counted_and_the_next_one_runs() -> None:
    fitting, done = BackgroundFit(), threading.Event()

    def fails() -> None:
        raise RuntimeError("no memory")

    fitting.start(fails)
    fitting.wait()
    fitting.start(done.set)
    fitting.wait()
    assert (fitting.failures, done.is_set()) == (1, True)
