import random

from streamrl.producers.grading.grader import PartitionProgress


def test_only_finished_records_are_committed() -> None:
    assert PartitionProgress().low is None
    progress, chance = PartitionProgress(), random.Random(3)
    begun, ended = list[int](), set[int]()
    offsets = iter(sorted(chance.sample(range(1000), 200)))  # with gaps, as on a topic
    for _ in range(400):
        if chance.random() < 0.5 and (offset := next(offsets, None)) is not None:
            progress.begin(offset)
            begun.append(offset)
        elif open_ := [offset for offset in begun if offset not in ended]:
            offset = chance.choice(open_)
            progress.end(offset)
            ended.add(offset)
        low = progress.low
        assert low is None or all(offset in ended for offset in begun if offset < low)
        assert progress.unfinished == len(begun) - len(ended)
    for offset in begun:
        progress.end(offset)
    assert progress.low == begun[-1] + 1
