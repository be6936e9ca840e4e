from pathlib import Path

import pytest

from streamrl.deploy.wiring.build import build_dispatcher, build_role, build_worker
from streamrl.deploy.wiring.process import Watchdog, process_context
from streamrl.producers.gateway.gateway import Gateway
from streamrl.producers.gateway.role_meters import GatewayMeter
from streamrl.producers.gateway.worker_requests import RequestSlots
from streamrl.schemas.errors import DataError, SettingsError
from streamrl.settings.features import ChildProcess, features
from streamrl.settings.loading import load_settings, validated
from streamrl.settings.tree import Settings
from tests.deploy.wiring.roles import metering, role_settings


@pytest.fixture
def settings(tmp_path: Path) -> Settings:
    return role_settings(tmp_path)


def test_workers_keep_slots_for_requests_where_there_is_a_gateway(settings: Settings) -> None:
    context = process_context("worker-1", settings, Watchdog(1.0), None, None)
    assert build_worker(settings, context).side_work == ()
    with pytest.raises(SettingsError, match=r"gateway\.enabled"):
        build_role("gateway", settings, context)
    tree = settings.model_dump(mode="json", exclude_none=True)
    served = validated(tree | {"gateway": {"enabled": True}})
    (requests,) = build_worker(served, context).side_work
    assert isinstance(requests, RequestSlots)
    assert requests.slots == served.generation.max_num_seqs // 4
    metered = metering("gateway")
    gateway = build_role("gateway", served, process_context("gateway", served, Watchdog(1.0), None, metered))
    assert isinstance(gateway, Gateway)
    assert gateway.secret == requests.secret, "made once for both"
    (collect,) = metered.collectors
    collect()
    observer = gateway.observers.requests
    assert isinstance(observer, GatewayMeter)
    observer.answered("/v1/completions", 200, 0.5)
    observer.first_token(0.1)
    sample = metered.meters.registry.get_sample_value
    assert sample("streamrl_gateway_workers", {"run": "r"}) == 0
    told = {"run": "r", "route": "/v1/completions", "status": "200"}
    assert sample("streamrl_gateway_requests_total", told) == 1
    with_secret = {"generation": {**tree["generation"], "request_secret": "x"}, "gateway": {"enabled": True}}
    given = validated(tree | with_secret)
    assert build_worker(given, context).side_work == (
        RequestSlots("127.0.0.1", given.generation.max_num_seqs // 4, "x"),
    )
    with pytest.raises(SettingsError, match="orders would have no slot"):
        validated(tree | {"generation": {**tree["generation"], "max_num_seqs": 1}, "gateway": {"enabled": True}})


def test_a_run_without_prompts_has_all_slots_for_requests_and_no_rewards_of_its_own(settings: Settings) -> None:
    tree = settings.model_dump(mode="json", exclude_none=True) | {"data": {"requests_only": True}}
    with pytest.raises(SettingsError, match=r"expected gateway\.enabled with data\.requests_only"):
        validated(tree)
    served = validated(tree | {"gateway": {"enabled": True}})
    worker = build_worker(served, process_context("worker-1", served, Watchdog(1.0), None, None))
    (requests,) = worker.side_work
    assert requests.reserved_slots == served.generation.max_num_seqs
    assert worker.rewards.names == ()
    with pytest.raises(DataError, match="requests_only"):
        build_dispatcher(served, process_context("dispatcher", served, Watchdog(1.0), None, None))
    with pytest.raises(SettingsError, match=r"got data\.requests_only and data\.dataset"):
        validated(tree | {"data": {"requests_only": True, "dataset": "chain_sum"}, "gateway": {"enabled": True}})


def test_an_algorithm_that_learns_nothing_from_one_completion_says_so(settings: Settings) -> None:
    tree = settings.model_dump(mode="json", exclude_none=True) | {"gateway": {"enabled": True}}
    for name, learns in (("grpo", False), ("rloo", False), ("reinforce_plus_plus", True), ("rft", True)):
        served = validated(tree | {"algorithm": {"name": name}})
        gateway = build_role("gateway", served, process_context("gateway", served, Watchdog(1.0), None, None))
        assert isinstance(gateway, Gateway)
        assert (gateway.lone_refusal == "") == learns
        assert learns or "reinforce_plus_plus" in gateway.lone_refusal


def test_a_gateway_is_started_only_when_wanted_and_the_run_goes_on_without_it(settings: Settings) -> None:
    tree = settings.model_dump(mode="json", exclude_none=True) | {"gateway": {"enabled": True}}
    (gateway,) = [one for feature in features() for one in feature.processes.started(validated(tree))]
    assert gateway == ChildProcess("gateway", "gateway", optional=True)
    assert not [one for feature in features() for one in feature.processes.started(settings)]


def test_weights_do_not_wait_for_requests(tmp_path: Path) -> None:
    path = tmp_path / "a.toml"
    path.write_text('[model]\npath = "m"\n[data]\nrequests_only = true\n[gateway]\nenabled = true\n')
    with pytest.raises(SettingsError, match=r'no generation\.adopt = "idle" with data\.requests_only') as caught:
        load_settings(path, ["--generation.adopt=idle"])
    assert "\n" not in str(caught.value)
    assert load_settings(path, ["--generation.adopt=recompute"]).generation.adopt == "recompute"
