import pytest
from prometheus_client import CollectorRegistry

from streamrl.bus.memory import MemoryBus
from streamrl.bus.port import Bus, Outgoing
from streamrl.observability.interceptor import observed
from streamrl.observability.metrics.families import Meters
from streamrl.observability.metrics.metering import (
    CoordinatorMeter,
    MeteringObserver,
    TrainerMeter,
    WorkerMeter,
    of_message,
)
from streamrl.schemas.errors import Superseded
from streamrl.schemas.identifiers import PolicyVersion
from streamrl.schemas.messages import Message
from streamrl.schemas.reports import SkipReason
from tests.fakes.clock import FakeClock
from tests.schemas.examples import examples


@pytest.fixture
def meters() -> Meters:
    return Meters("r")


def value(registry: CollectorRegistry, name: str, /, **labels: str) -> float | None:
    return registry.get_sample_value(f"streamrl_{name}", {"run": "r", **labels})


def metered(meters: Meters) -> tuple[Bus, MeteringObserver]:
    bus = MemoryBus()
    bus.create_topic("r.steps", 1)
    observer = MeteringObserver(meters)
    return observed(bus, observer), observer


async def test_records_written_and_read_are_counted_and_unchanged(meters: Meters) -> None:
    bus, _ = metered(meters)
    subscription = await bus.subscribe(["r.steps"], client_id="c")
    publisher = await bus.publisher("p")
    await publisher.publish(Outgoing("r.steps", b"abc", "k"))
    transactional = await bus.transactional("t")
    await transactional.commit([Outgoing("r.steps", b"de", "k"), Outgoing("r.steps", None, "k")])
    assert [record.value for record in await subscription.poll()] == [b"abc", b"de", None]
    for direction in ("published", "consumed"):
        assert value(meters.registry, f"bus_{direction}_records_total", topic="steps") == 3
        assert value(meters.registry, f"bus_{direction}_bytes_total", topic="steps") == 5
    assert value(meters.registry, "bus_publish_duration_seconds_count", topic="steps") == 2


async def test_a_transaction_that_fails_is_not_counted_as_written(meters: Meters) -> None:
    bus, _ = metered(meters)
    old = await bus.transactional("t")
    await bus.transactional("t")
    with pytest.raises(Superseded):
        await old.commit([Outgoing("r.steps", b"de", "k")])
    assert value(meters.registry, "bus_published_records_total", topic="steps") is None


async def test_measuring_never_fails(meters: Meters) -> None:
    bus, observer = metered(meters)
    seen = []

    def failing(message: Message) -> None:
        seen.append(message)
        raise ZeroDivisionError

    observer.sent["r.steps"] = of_message(failing)
    publisher = await bus.publisher("p")
    for _ in range(2):
        await publisher.publish(Outgoing("r.steps", b"rubbish", None))
        await publisher.publish(Outgoing.of("r.steps", examples()["step-report"], key="k"))
    assert len(seen) == 1
    assert value(meters.registry, "bus_published_records_total", topic="steps") == 4


def test_a_trainer_s_reports_become_figures_and_count_once(meters: Meters) -> None:
    trainer, report = TrainerMeter(meters), examples()["step-report"]
    metrics = {
        "reward": 0.5,
        "time/step": 2.0,
        "time/wait_for_batch": 1.5,
        "time/train_share": 0.9,
        "kafka/lag/bucket_1": 12.0,
        "completions/num_tokens": 100.0,
    }
    for _ in range(2):  # announced again after a restart of the broker
        trainer.reported(report.replace(metrics=metrics))
    labels = {"algorithm": "grpo"}
    assert value(meters.registry, "trainer_steps_total", **labels) == 1
    assert value(meters.registry, "trained_trajectories_total", **labels) == 2
    assert value(meters.registry, "trained_tokens_total", **labels) == 100
    assert value(meters.registry, "trainer_policy_version", **labels) == 4
    assert value(meters.registry, "trainer_phase_seconds_total", phase="wait_for_batch", **labels) == 1.5
    assert value(meters.registry, "trainer_phase_seconds_total", phase="train_share", **labels) is None
    assert value(meters.registry, "unfinished_trajectories", bucket="1", **labels) == 12
    assert value(meters.registry, "step_metric", name="reward", **labels) == 0.5


def test_skips_and_dead_letters_count_by_reason(meters: Meters) -> None:
    trainer, skip = TrainerMeter(meters), examples()["skip"]
    trainer.reported(skip)
    trainer.reported(skip.replace(reason=SkipReason.RETENTION_EXPIRED, offset=10, end_offset=15))
    trainer.reported(examples()["refused-step"])
    trainer.dead_letter(None, (("dlq-error-class", b"MalformedFrame"),))
    assert value(meters.registry, "skipped_trajectories_total", algorithm="grpo", reason="stale") == 1
    assert value(meters.registry, "skipped_trajectories_total", algorithm="grpo", reason="retention_expired") == 5
    assert value(meters.registry, "trainer_refused_steps_total", algorithm="grpo") == 1
    assert value(meters.registry, "dead_letters_total", error="MalformedFrame") == 1


def test_a_worker_s_heartbeats_become_figures(meters: Meters) -> None:
    worker, beat = WorkerMeter(meters), examples()["heartbeat"]
    worker.heartbeat(beat.replace(generated_tokens=10))
    worker.heartbeat(beat.replace(generated_tokens=25, version=PolicyVersion(2, 9)))
    assert value(meters.registry, "worker_generated_tokens_total", worker="worker-1") == 25
    assert value(meters.registry, "worker_policy_version", worker="worker-1") == 9
    assert value(meters.registry, "worker_state", worker="worker-1", state="draining") == 1


def test_the_coordinator_counts_workers_by_state(meters: Meters) -> None:
    clock = FakeClock()
    coordinator, beat = CoordinatorMeter(meters, clock), examples()["heartbeat"]
    coordinator.heartbeat(beat.replace(worker_id="w2", sent_at=clock.now + 3600.0))  # its own clock proves nothing
    clock.advance(50.0)
    for name in ("w0", "w1"):
        coordinator.heartbeat(beat.replace(worker_id=name, sent_at=clock.now - 3600.0))
    clock.advance(5.0)
    coordinator.collect(10.0)
    assert value(meters.registry, "workers", standing="draining") == 2
    assert value(meters.registry, "workers", standing="lost") == 1
    ready, finished = examples()["control-weights-ready"], examples()["control-run-finished"]
    coordinator.recovered(ready)
    coordinator.announced(ready)
    coordinator.announced(finished)
    assert value(meters.registry, "weights_announced_total") == 1
    assert value(meters.registry, "run_finished") == 1
