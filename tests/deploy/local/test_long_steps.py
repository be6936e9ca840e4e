"""What `streamrl run` says while a step takes long."""

import threading

import pytest

from streamrl.deploy.local.long_steps import told_if_long


def test_a_long_step_is_told_again_and_again_with_its_stage() -> None:
    told: list[str] = []
    stages, enough = iter(["", "reading", "reading", "trying"]), threading.Event()

    def tell(line: str) -> None:
        told.append(line)
        if len(told) == 3:
            enough.set()

    with told_if_long("checking the task", lambda: next(stages, "trying"), every_s=0.001, tell=tell):
        assert enough.wait(10)
    assert told[:3] == [
        "checking the task, 0 s so far",
        "checking the task, 0 s so far: reading",
        "checking the task, 0 s so far: reading",
    ]


def test_a_short_step_and_one_that_fails_are_not_told() -> None:
    told: list[str] = []
    with told_if_long("checking the task", tell=told.append):
        pass
    with pytest.raises(ValueError, match="wrong"), told_if_long("checking the task", tell=told.append):
        raise ValueError("wrong")
    assert told == []
