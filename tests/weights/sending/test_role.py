from pathlib import Path

import pytest

from streamrl.schemas.errors import SettingsError
from streamrl.settings.features import ChildProcess, Sending, features
from streamrl.settings.loading import load_settings, validated
from streamrl.settings.tree import Settings
from streamrl.weights.sending.role import FEATURE
from streamrl.weights.sending.settings import SenderSettings
from tests.deploy.wiring.roles import role_settings


def sender_of(settings: Settings) -> SenderSettings:
    return settings.section(SenderSettings)


@pytest.fixture
def tree(tmp_path: Path) -> dict[str, object]:
    settings: Settings = role_settings(tmp_path)
    tree = settings.model_dump(mode="json", exclude_none=True)
    return tree | {"generation": {"engine": "vllm"}, "training": {"backend": "torch"}}


def test_a_sender_is_started_only_when_wanted_on_the_trainers_devices_and_the_run_goes_on_without_it(
    tree: dict[str, object],
) -> None:
    wanted = validated(tree | {"sender": {"backend": "gloo", "port": 8211}})
    (process,) = [one for feature in features() for one in feature.processes.started(wanted)]
    assert process == ChildProcess("sender", "sender", optional=True, on_trainer_devices=True)
    assert FEATURE.start.options(wanted) == ["--sender.port=8211"]
    assert FEATURE.loop.sending(wanted) == Sending("gloo", "http://127.0.0.1:8211")
    without = validated(tree)
    assert not [one for feature in features() for one in feature.processes.started(without)]
    assert (FEATURE.start.options(without), FEATURE.loop.sending(without)) == ([], None)


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (["--generation.engine=transformers"], "which takes weights only from files"),
        (["--training.backend=emulated"], "which has no weights to send"),
        (["--training.lora.rank=8"], "adapters are small"),
        (["--sender.host=0.0.0.0"], "engines need an address"),
    ],
)
def test_what_does_not_go_with_a_weight_sender_is_refused_in_one_line(arguments: list[str], said: str) -> None:
    base = ["--data.dataset=chain_sum", "--model.path=m", "--generation.engine=vllm", "--sender.backend=gloo"]
    told = load_settings(None, [*base, "--sender.port=4200"])
    assert (sender_of(told).address, sender_of(load_settings(None, base)).address) == ("http://127.0.0.1:4200", "")
    with pytest.raises(SettingsError, match=said) as refused:
        load_settings(None, [*base, *arguments])
    assert "\n" not in str(refused.value)
    with pytest.raises(SettingsError, match=r"no sender\.port with sender\.backend"):
        load_settings(None, [*base[:2], "--sender.port=4200"])
