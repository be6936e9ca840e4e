from pathlib import Path

from deploy.local.run import child_specs
from settings.run_directory import RunDirectory


def test_a_ranker_is_started_only_when_wanted_and_the_run_goes_on_without_it() -> None:
    directory = RunDirectory(Path("runs/x"))
    without, wanted = (child_specs(directory, 2, [], ranker=ranker) for ranker in (False, True))
    assert [spec.name for spec in without] == [
        "coordinator", "relay", "trainer", "worker-0", "worker-1", "dispatcher",
    ]  # fmt: skip
    (ranker,) = [spec for spec in wanted if spec not in without]
    assert (ranker.name, ranker.optional, ranker.essential) == ("ranker", True, False)
    assert ranker.command[4:6] == ["ranker", str(directory.config)]
