from consumers.ingest.filters import DedupeWindow


def test_an_id_is_accepted_once() -> None:
    window = DedupeWindow(10)
    assert [window.accept(name, (0, place)) for place, name in enumerate("abab")] == [True, True, False, False]
    assert window.ids == {"a": (0, 0), "b": (0, 1)}


def test_the_window_forgets_the_oldest_first() -> None:
    window = DedupeWindow(2)
    for place, name in enumerate("abc"):
        window.accept(name, (0, place))
    assert list(window.ids) == ["b", "c"]


def test_restored_ids_are_known() -> None:
    window = DedupeWindow(2)
    window.restore({"a": (3, 4)})
    assert not window.accept("a", (3, 9))
