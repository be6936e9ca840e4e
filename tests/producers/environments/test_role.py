from pathlib import Path

import pytest

from streamrl.deploy.wiring.build import build_role
from streamrl.deploy.wiring.process import Watchdog, process_context
from streamrl.producers.environments.driver import Environments
from streamrl.producers.environments.role import FEATURE
from streamrl.producers.gateway.keys import KeyFile
from streamrl.schemas.errors import SettingsError, UserError
from streamrl.settings.features import ChildProcess, features
from streamrl.settings.loading import validated
from streamrl.settings.tree import Settings
from tests.deploy.wiring.roles import role_settings


@pytest.fixture
def settings(tmp_path: Path) -> Settings:
    return role_settings(tmp_path)


def test_environments_have_a_key_of_their_own_for_the_runs_gateway(settings: Settings, tmp_path: Path) -> None:
    tree = settings.model_dump(mode="json", exclude_none=True) | {"environments": {"names": ["guess"]}}
    with pytest.raises(SettingsError, match=r"expected gateway\.enabled with environments\.names"):
        validated(tree)
    with pytest.raises(SettingsError, match=r"expected a fixed gateway\.port with environments\.names, got 0"):
        validated(tree | {"gateway": {"enabled": True, "port": 0}})
    wanted = validated(tree | {"gateway": {"enabled": True, "port": 8123}})
    context = process_context("environments", wanted, Watchdog(1.0), None, None)
    for _ in range(2):
        made = build_role("environments", wanted, context)
        assert isinstance(made, Environments)
        assert (made.door.address, made.door.model) == ("http://127.0.0.1:8123", "r")
        (key,) = KeyFile(tmp_path / "r" / "gateway" / "keys.json").read()
        assert (key.name, key.train) == ("environments", True)
        assert not made.learns_alone
    elsewhere = {"names": ["guess"], "gateway": "http://far:1/", "api_key": "k"}
    named = build_role("environments", validated(tree | {"environments": elsewhere}), context)
    assert isinstance(named, Environments)
    assert (named.door.address, named.door.api_key) == ("http://far:1", "k")
    for wrong in ("nothing", "verifiers:"):
        with pytest.raises(SettingsError, match="expected one of calculator"):
            validated(tree | {"environments": {"names": [wrong]}, "gateway": {"enabled": True}})
    with pytest.raises(SettingsError, match=r"expected environments\.names"):
        build_role("environments", settings, context)


def test_a_run_does_not_go_on_without_its_environments(settings: Settings) -> None:
    tree = settings.model_dump(mode="json", exclude_none=True)
    tree |= {"environments": {"names": ["guess"]}, "gateway": {"enabled": True}}
    for data in (tree["data"], {"requests_only": True}):
        wanted = validated(tree | {"data": data})
        _, environments = [one for feature in features() for one in feature.processes.started(wanted)]
        assert environments == ChildProcess("environments", "environments")


@pytest.mark.processes
async def test_the_dry_run_plays_an_episode_of_each_environment(settings: Settings) -> None:
    tree = settings.model_dump(mode="json", exclude_none=True) | {"gateway": {"enabled": True}}
    wanted = validated(tree | {"environments": {"names": ["calculator", "guess"]}})
    said = await FEATURE.start.try_out(wanted)
    policy = "a made-up policy that says 'I do not know.'"
    assert said == f"one episode of each was played with {policy}; rewards: calculator 0, guess 0"
    assert await FEATURE.start.try_out(settings) is None


@pytest.mark.processes
async def test_the_dry_run_finds_an_environment_whose_step_raises(settings: Settings) -> None:
    tree = settings.model_dump(mode="json", exclude_none=True) | {"gateway": {"enabled": True}}
    broken = "tests.producers.environments.test_driver:Raises"
    wanted = validated(tree | {"environments": {"names": [broken]}})
    with pytest.raises(UserError, match=r"an episode of tests.*Raises that can be played, got: .*no such piece"):
        await FEATURE.start.try_out(wanted)
    wrong = {"names": ["guess"], "options": {"guess": {"number": 3}}}
    with pytest.raises(UserError, match="options that environment guess accepts"):
        await FEATURE.start.try_out(validated(tree | {"environments": wrong}))
