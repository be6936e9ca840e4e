from observability.tracing.context import Memory


def test_the_oldest_is_forgotten_when_there_are_too_many() -> None:
    memory: Memory[str, int] = Memory(2)
    for number, name in enumerate("abac"):
        memory.put(name, number)
    assert [memory.get(name) for name in "abc"] == [2, None, 3]
    assert memory.pop("a") == 2
    assert memory.pop("a") is None
    assert len(memory) == 1
