from tests.settings.test_placement import visible


def test_a_standby_uses_the_device_of_the_trainer_that_it_takes_over_from() -> None:
    devices = visible(8, "--run.workers=1", "--run.standby_trainers=1")
    assert {name: device for name, device in devices.items() if device} == {
        "trainer": "0",
        "standby-0": "0",
        "worker-0": "1",
    }
