import re

import pytest
from prometheus_client import CollectorRegistry

from streamrl.observability.metrics.families import PREFIX, Meters
from streamrl.settings.features import metric_families


def value(registry: CollectorRegistry, name: str, **labels: str) -> float | None:
    return registry.get_sample_value(PREFIX + name, {"run": "r", **labels})


def test_names_follow_the_conventions() -> None:
    names = [family.name for family in metric_families()]
    assert len(set(names)) == len(names)
    for family in metric_families():
        assert re.fullmatch(r"[a-z]+(_[a-z]+)*", family.name)
        assert not family.name.endswith("_total")
        assert family.help.endswith(".")
        assert (family.kind == "histogram") == bool(family.buckets)
        assert not {"trajectory", "group_id", "prompt"} & set(family.labels)
        if family.kind == "histogram":
            assert family.name.endswith("_seconds")


def test_counters_and_gauges_carry_the_run_and_their_labels() -> None:
    meters = Meters("r")
    meters.count("trainer_steps", "grpo")
    meters.count("trainer_steps", "grpo", by=2)
    meters.set(7, "unfinished_trajectories", "grpo", "0")
    meters.observe(0.3, "trainer_step_duration_seconds", "grpo")
    assert value(meters.registry, "trainer_steps_total", algorithm="grpo") == 3
    assert value(meters.registry, "unfinished_trajectories", algorithm="grpo", bucket="0") == 7
    assert value(meters.registry, "trainer_step_duration_seconds_count", algorithm="grpo") == 1


def test_a_counter_that_follows_another_one_survives_its_restart() -> None:
    meters = Meters("r")
    for total in (5, 9, 9, 2, 4):
        meters.count_to(total, "worker_generated_tokens", "w")
    assert value(meters.registry, "worker_generated_tokens_total", worker="w") == 13


def test_one_of_several_choices_is_set() -> None:
    meters = Meters("r")
    for mode in ("run", "pause"):
        meters.set_one_of("flow_mode", mode, ("run", "pause", "drain"))
    assert [value(meters.registry, "flow_mode", mode=mode) for mode in ("run", "pause", "drain")] == [0, 1, 0]


def test_a_forgotten_gauge_is_not_exported_until_it_is_set_again() -> None:
    meters = Meters("r")
    meters.set(1, "consumer_lag_records", "t", "0", "g")
    meters.forget("consumer_lag_records")
    assert value(meters.registry, "consumer_lag_records", topic="t", partition="0", group="g") is None
    meters.set(2, "consumer_lag_records", "t", "1", "g")
    assert value(meters.registry, "consumer_lag_records", topic="t", partition="1", group="g") == 2


def test_a_family_that_is_not_in_the_catalogue_cannot_be_measured() -> None:
    with pytest.raises(KeyError):
        Meters("r").count("surprise")
