"""A role gets its bus, engine and callbacks from its process when it is built. Nothing is replaced later."""

from pathlib import Path
from typing import Any

import pytest

from streamrl.bus.kafka.bus import KafkaBus
from streamrl.bus.memory import MemoryBus
from streamrl.deploy.wiring.build import build_dispatcher, build_relay, build_role, build_worker
from streamrl.deploy.wiring.process import Watchdog, process_context, process_name
from streamrl.observability.interceptor import ObservedBus
from streamrl.observability.role_context import ProcessContext
from streamrl.observability.tracing.context import LoggedTraces
from streamrl.observability.tracing.role_tracers import Tracing, open_tracing, tracing_of
from streamrl.observability.tracing.worker_tracer import TracedEngine
from streamrl.producers.dispatch.admission import HISTORY_STEPS
from streamrl.producers.dispatch.dispatcher import Dispatcher
from streamrl.schemas.errors import SettingsError, UserError
from streamrl.schemas.identifiers import PolicyVersion
from streamrl.settings.tree import Settings
from tests.deploy.wiring.roles import metering, role_settings

ROLES = ("dispatcher", "worker", "trainer", "coordinator")


@pytest.fixture
def settings(tmp_path: Path) -> Settings:
    return role_settings(tmp_path)


def tracing(role: str) -> Tracing | None:
    return tracing_of(role, role, "r", 1.0, lambda _: None, LoggedTraces())


def bus_of(built: Any) -> Any:
    """The bus of a built role. A trainer has it in its context, and may be wrapped in another object."""
    if hasattr(built, "bus"):
        return built.bus
    context = built.context if hasattr(built, "context") else built.trainer.context
    return context.run.bus


@pytest.mark.parametrize("role", ROLES)
def test_a_role_gets_the_plain_bus_without_observers(settings: Settings, role: str) -> None:
    context = process_context("worker-1", settings, Watchdog(1.0), None, None)
    built = build_role(role, settings, context)
    assert isinstance(bus_of(built), KafkaBus)


@pytest.mark.parametrize("role", ROLES)
@pytest.mark.parametrize("observing", ["traces", "metrics", "both"])
def test_a_role_gets_one_interceptor_however_many_observe(settings: Settings, role: str, observing: str) -> None:
    traced = None if observing == "metrics" else tracing(role)
    metered = None if observing == "traces" else metering(role)
    built = build_role(role, settings, process_context("worker-1", settings, Watchdog(1.0), traced, metered))
    bus = bus_of(built)
    assert isinstance(bus, ObservedBus)
    assert isinstance(bus.inner, KafkaBus)


def test_a_traced_worker_gets_a_traced_engine_and_every_role_the_watchdog(settings: Settings) -> None:
    watchdog = Watchdog(1.0)
    plain = build_worker(settings, process_context("worker-1", settings, watchdog, None, metering("worker")))
    assert not isinstance(plain.engine, TracedEngine)
    assert plain.worker_id == "worker-1"
    traced = build_worker(settings, process_context("worker-1", settings, watchdog, tracing("worker"), None))
    assert isinstance(traced.engine, TracedEngine)
    assert (traced.engine.name, traced.engine.max_num_seqs) == (plain.engine.name, plain.engine.max_num_seqs)
    for role in ("dispatcher", "worker", "coordinator"):
        built = build_role(role, settings, process_context("worker-1", settings, watchdog, None, None))
        assert built.on_tick == watchdog.tick  # type: ignore[attr-defined]


def test_metrics_ask_the_dispatcher_for_its_status(settings: Settings) -> None:
    metered = metering("dispatcher")
    context = process_context("dispatcher", settings, Watchdog(1.0), None, metered)
    assert isinstance(build_role("dispatcher", settings, context), Dispatcher)
    (collect,) = metered.collectors
    collect()
    assert metered.meters.registry.get_sample_value("streamrl_dispatcher_groups_in_flight", {"run": "r"}) == 0


def test_the_relay_counts_its_answers_in_metrics(settings: Settings) -> None:
    metered = metering("relay")
    assert build_relay(settings, process_context("relay", settings, Watchdog(1.0), None, metered)).on_response == (
        metered.count_response
    )


def test_tracing_that_is_off_writes_nothing(settings: Settings) -> None:
    with open_tracing("worker", "worker-1", "r", settings.telemetry, settings.run.path, LoggedTraces()) as found:
        assert found is None
    assert not settings.run.path.exists()


def test_a_worker_without_an_id_makes_one_up_and_others_are_called_as_their_role() -> None:
    assert process_name("trainer", "") == "trainer"
    assert process_name("worker", "w-1") == "w-1"
    assert process_name("worker", "") != process_name("worker", "")
    with pytest.raises(SettingsError, match="expected an id of 1 to 64"):
        process_name("worker", "Not plain")


def test_a_role_that_there_is_not_is_a_wrong_command(settings: Settings) -> None:
    with pytest.raises(UserError, match="expected one of worker"):
        build_role("judge", settings, process_context("judge", settings, Watchdog(1.0), None, None))


def dispatcher_of(settings: Settings, **training: int) -> Dispatcher:
    changed = settings.training.model_copy(update=training)
    context = ProcessContext("dispatcher", MemoryBus())
    return build_dispatcher(settings.model_copy(update={"training": changed}), context)


def test_by_default_the_dispatcher_remembers_two_checkpoint_intervals(settings: Settings) -> None:
    assert dispatcher_of(settings).state.ledger.history_steps == HISTORY_STEPS


def test_however_far_apart_checkpoints_are_a_resumed_trainer_is_not_flooded(settings: Settings) -> None:
    """The trainer stops just before its third checkpoint, and the newer of its two checkpoints is damaged."""
    ledger = dispatcher_of(settings, checkpoint_every=400, keep_checkpoints=2).state.ledger
    ledger.advance(PolicyVersion(1, 0), [])
    for number in range(1, 1200):
        ledger.admit(f"g{number}", PolicyVersion(1, number - 1))
        ledger.advance(PolicyVersion(1, number), [f"g{number}"])
    ledger.advance(PolicyVersion(2, 400), [])
    assert ledger.in_flight == 1199 - 400
