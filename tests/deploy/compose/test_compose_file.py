import json
import os
import re
import subprocess
from collections.abc import Callable
from importlib import resources
from pathlib import Path
from typing import Any, Literal

import jsonschema
import pytest
import yaml

from streamrl.bus.kafka.settings import KafkaSettings
from streamrl.cli.app import app
from streamrl.init.examples import as_commented_toml, example
from streamrl.producers.grading.settings import GradedRewards
from streamrl.schemas.identifiers import is_plain_name
from streamrl.schemas.topics import CATALOGUE
from streamrl.settings.layers import SettingsLayers, from_environment, from_toml
from streamrl.settings.loading import validated
from streamrl.settings.tree import Settings
from tests.deploy.compose.stack import FILE, IMAGES, OURS, ROLES, services, stack

TASK = IMAGES / "trial" / "streamrl.toml"


def merged(environment: dict[str, str], task: Path = TASK) -> Settings:
    given = SettingsLayers(task, from_toml(task), from_environment(environment), {})
    tree: dict[str, Any] = {}
    for layer in given.layers:
        for section, values in layer.items():
            tree[section] = tree.get(section, {}) | values
    return validated(tree, given)


def test_it_is_valid_by_the_compose_specifications_schema() -> None:
    schema = json.loads(
        resources.files("check_jsonschema").joinpath("builtin_schemas/vendor/compose-spec.json").read_text()
    )
    jsonschema.validate(stack({}), schema)


def test_the_schema_can_refuse_it() -> None:
    schema = json.loads(
        resources.files("check_jsonschema").joinpath("builtin_schemas/vendor/compose-spec.json").read_text()
    )
    wrong = stack({})
    wrong["services"]["trainer"]["depend_on"] = {}
    with pytest.raises(jsonschema.ValidationError, match="depend_on"):
        jsonschema.validate(wrong, schema)


def test_no_key_is_written_twice() -> None:
    class Strict(yaml.SafeLoader):
        pass

    def mapping(loader: yaml.SafeLoader, node: yaml.MappingNode) -> dict[Any, Any]:
        keys = [key.value for key, _ in node.value if key.tag != "tag:yaml.org,2002:merge"]
        assert len(keys) == len(set(keys)), keys
        loader.flatten_mapping(node)
        return dict(loader.construct_pairs(node))

    Strict.add_constructor("tag:yaml.org,2002:map", mapping)
    assert yaml.load(FILE.read_text(), Strict)["services"].keys() == services().keys()  # noqa: S506 - a safe loader


def test_every_dependency_and_mount_of_a_service_exists() -> None:
    all_services, volumes = services(), stack({})["volumes"]
    for name, service in all_services.items():
        for needed, how in service.get("depends_on", {}).items():
            assert needed in all_services, f"{name} waits for {needed}"
            assert how["condition"] != "service_healthy" or "healthcheck" in all_services[needed], (name, needed)
            assert not all_services[needed].get("profiles") or service.get("profiles"), f"{name} waits for a profile"
        for mount in service.get("volumes", []):
            source, target, *_ = mount.split(":")
            assert target.startswith("/")
            assert (FILE.parent / source).exists() if source.startswith(".") else source in volumes, (name, source)


@pytest.mark.parametrize("name", OURS)
def test_our_processes_run_without_privileges(name: str) -> None:
    service = services()[name]
    assert service["user"] == "10001:10001"
    assert service["cap_drop"] == ["ALL"]
    assert service["security_opt"] == ["no-new-privileges:true"]
    assert "privileged" not in service


def test_images_of_others_name_a_version() -> None:
    for name, service in services().items():
        if name not in OURS:
            assert re.fullmatch(r"[a-z-]+/[a-z-]+:v?\d+\.\d+\.\d+", service["image"]), service["image"]


def test_ports_are_open_to_this_machine_alone() -> None:
    ports = [port for service in services().values() for port in service.get("ports", [])]
    assert ports
    assert all(port.startswith("127.0.0.1:") for port in ports)


@pytest.mark.parametrize("name", ROLES)
def test_the_settings_of_every_process_are_valid_and_agree(name: str) -> None:
    given = services()[name]["environment"] | {"STREAMRL_GENERATION__ENGINE": "emulated", "STREAMRL_RUN__NAME": "x"}
    settings = merged(given)
    assert settings.run.path == Path("/runs/x")
    assert settings.metrics.port
    assert settings.run.log_files == (name not in ("prepare", "run")), "run writes the logs of those that it starts"
    if name in ("prepare", "run"):  # either leaves the settings that the processes of `run` read
        assert settings.coordinator.relays == (f"http://run:{settings.relay.port}",)
        assert settings.relay.host == "0.0.0.0"
        assert not settings.run.trainer
        assert settings.run.workers == 0


@pytest.mark.parametrize("name", ["math", "tiny", "demo"])
def test_a_task_that_init_wrote_fits_in_as_it_is(name: Literal["math", "tiny", "demo"], tmp_path: Path) -> None:
    written = example(name, "my-task")
    config = tmp_path / f"{name}.toml"
    config.write_text(as_commented_toml(written.head, written.entries))
    settings = merged(services()["worker"]["environment"] | {"STREAMRL_RUN__NAME": "x"}, config)
    assert settings.run.path == Path("/runs/x")


@pytest.fixture
def name_in_the_container(tmp_path: Path) -> Callable[..., str]:
    """The run's name as the entry point leaves it for the command."""
    command = tmp_path / "streamrl"
    command.write_text('#!/bin/sh\nprintf %s "${STREAMRL_RUN__NAME-none}"\n')
    command.chmod(0o755)

    def name(**environment: str) -> str:
        given = {"PATH": f"{tmp_path}:{os.environ['PATH']}"} | environment
        return subprocess.run(["sh", IMAGES / "entrypoint.sh"], env=given, capture_output=True, text=True).stdout

    return name


@pytest.mark.processes
def test_another_task_has_another_name_and_so_never_goes_on_from_this_ones_checkpoints(
    name_in_the_container: Callable[..., str],
) -> None:
    names = {
        name_in_the_container(TASK_PATH=path)
        for path in ("demo", "./images/trial", "/home/me/My Task", "/home/you/My Task", "/home/me/My Task/")
    }
    assert len(names) == 5
    assert all(is_plain_name(name) for name in names)
    assert "demo" in names
    assert sum(name.startswith("my-task-") for name in names) == 3
    assert name_in_the_container(TASK_PATH="/home/me/my-task", STREAMRL_RUN__NAME="mine") == "mine"
    assert name_in_the_container() == "none", "outside Compose a name is the caller's affair"
    assert services()["run"]["environment"]["TASK_PATH"] == "demo"


def test_the_image_is_built_by_one_service_and_looked_for_in_no_registry() -> None:
    of_ours = {name: services()[name] for name in OURS}
    assert {service["image"] for service in of_ours.values()} == {"streamrl:latest", "streamrl-vllm:latest"}
    builders = [(service["image"], name) for name, service in of_ours.items() if "build" in service]
    assert builders == [("streamrl:latest", "task"), ("streamrl-vllm:latest", "worker-gpu")]
    assert all(service["pull_policy"] == "never" for service in of_ours.values())
    on_gpu = {name for name, service in of_ours.items() if service["image"] == "streamrl-vllm:latest"}
    assert on_gpu == {"worker-gpu", "trainer-gpu"} == {name for name in of_ours if "deploy" in of_ours[name]}


def test_every_log_is_bounded_and_no_volume_is_without_a_name() -> None:
    assert all(set(service["logging"]["options"]) == {"max-size", "max-file"} for service in services().values())
    # The three that its image declares.
    kafka = services()["kafka"]
    mounted = [mount.split(":")[1] for mount in kafka["volumes"]] + [mount.split(":")[0] for mount in kafka["tmpfs"]]
    assert set(mounted) == {"/etc/kafka/secrets", "/var/lib/kafka/data", "/mnt/shared/config"}


def test_every_command_is_one_of_ours() -> None:
    known = {command.name or getattr(command.callback, "__name__", "") for command in app.registered_commands}
    known |= {group.name or "" for group in app.registered_groups}
    for name in OURS:
        assert services()[name]["command"][0] in known, name


def test_the_broker_is_reached_from_inside_and_from_the_host() -> None:
    kafka, inside = services()["kafka"]["environment"], services()["worker"]["environment"]
    listeners = dict(entry.split("://") for entry in kafka["KAFKA_LISTENERS"].split(","))
    advertised = dict(entry.split("://") for entry in kafka["KAFKA_ADVERTISED_LISTENERS"].split(","))
    protocols = dict(entry.split(":") for entry in kafka["KAFKA_LISTENER_SECURITY_PROTOCOL_MAP"].split(","))
    assert advertised["INSIDE"] == inside["STREAMRL_KAFKA__BOOTSTRAP_SERVERS"] == f"kafka{listeners['INSIDE']}"
    assert advertised["HOST"] == f"localhost{listeners['HOST']}"
    assert services()["kafka"]["ports"] == [f"127.0.0.1:9092{listeners['HOST']}"]
    assert set(listeners) == set(protocols) == {*advertised, kafka["KAFKA_CONTROLLER_LISTENER_NAMES"]}
    assert KafkaSettings(bootstrap_servers=advertised["HOST"]).security_protocol == protocols["HOST"]


def test_the_broker_takes_the_largest_record_and_makes_no_topic_by_itself() -> None:
    kafka = services()["kafka"]["environment"]
    assert int(kafka["KAFKA_MESSAGE_MAX_BYTES"]) >= max(topic.max_message_bytes for topic in CATALOGUE)
    assert kafka["KAFKA_AUTO_CREATE_TOPICS_ENABLE"] == "false"


def test_variables_name_another_task_and_another_run() -> None:
    named = services({"STREAMRL_TASK": "/home/me/my-task", "STREAMRL_RUN__NAME": "mine"})
    assert "/home/me/my-task:/task:ro" in named["worker"]["volumes"]
    assert named["worker"]["environment"]["STREAMRL_RUN__NAME"] == "mine"
    assert named["worker"]["environment"]["TASK_PATH"] == "/home/me/my-task"


def test_graders_are_a_profile_and_run_starts_those_of_the_task_unless_the_shell_says_otherwise(tmp_path: Path) -> None:
    task = tmp_path / "streamrl.toml"
    task.write_text(f'{TASK.read_text()}\n[rewards]\nfunctions = ["format"]\ngraded = ["format"]\ngraders = 3\n')

    def started(variables: dict[str, str]) -> int:
        settings = merged(services(variables)["run"]["environment"] | {"STREAMRL_RUN__NAME": "x"}, task)
        return settings.section(GradedRewards).graders

    assert (started({}), started({"STREAMRL_REWARDS__GRADERS": "0"})) == (3, 0)
    assert services()["grader"]["profiles"] == ["graders"]


def test_a_judges_key_is_given_to_those_alone_that_call_judges() -> None:
    def holders(variables: dict[str, str]) -> set[str]:
        return {name for name, each in services(variables).items() if "OPENAI_API_KEY" in each["environment"]}

    assert holders({"OPENAI_API_KEY": "k"}) == {"prepare", "run", "grader"}
    assert holders({}) == set(), "the shell has none"


def test_prometheus_and_grafana_are_provisioned_with_what_the_repository_holds() -> None:
    prometheus, grafana = services()["prometheus"], services()["grafana"]
    scraping = yaml.safe_load((FILE.parent / "grafana" / "prometheus.yaml").read_text())
    (found,) = scraping["scrape_configs"][0]["file_sd_configs"][0]["files"]
    assert "--config.file=/srv/deploy/grafana/prometheus.yaml" in prometheus["command"]
    assert found.startswith("../../runs/")
    assert {"./grafana:/srv/deploy/grafana:ro", "runs:/srv/runs:ro"} <= set(prometheus["volumes"])
    mounted = {mount.split(":")[1] for mount in grafana["volumes"]}
    provider = yaml.safe_load((IMAGES / "grafana" / "dashboards.yaml").read_text())["providers"][0]
    assert any(path.startswith(provider["options"]["path"]) for path in mounted)
    source = yaml.safe_load((IMAGES / "grafana" / "datasources.yaml").read_text())["datasources"][0]
    assert source["url"] == "http://prometheus:9090"
