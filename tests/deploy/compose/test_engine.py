"""The compose file on a real engine, from building to the last volume, in this order: `make test-compose`."""

import json
import os
import re
import shutil
import time
import urllib.error
import urllib.request
from collections.abc import Iterator, Mapping
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import pytest

from streamrl.init.examples import write_example
from tests import broker_fixture
from tests.deploy.compose.engine import Compose, docker, why_not
from tests.deploy.compose.stack import OURS, task_like_the_trial

pytestmark = [
    pytest.mark.compose,
    pytest.mark.xdist_group("compose"),
    pytest.mark.timeout(3600),
]
PROJECT = "streamrl-test"
JOINED = ("run", "trainer", "worker")
LARGEST_BYTES = 2_000_000_000
WHOLE_RUN_S = 3000.0
"""The demo takes a tenth of that on two idle cores, its model another tenth."""
BUSY_S = 900.0
"""For what takes seconds where nothing else runs."""


def images() -> set[str]:
    """Of the engine, by name and tag."""
    return set(docker("image", "ls", "--format", "{{.Repository}}:{{.Tag}}"))


def unused_volumes() -> set[str]:
    """Of the engine: those that no container has. Others may have containers on it meanwhile."""
    return set(docker("volume", "ls", "--quiet", "--filter", "dangling=true"))


def open_task(folder: Path, changes: Mapping[str, str], more: str = "") -> Path:
    """A task like the trial, where every user may read it."""
    for_everybody(task_like_the_trial(folder, changes, more))
    return folder


def for_everybody(folder: Path) -> None:
    """pytest's own directories are its user's alone."""
    for path in (folder, *list(folder.parents)[:4]):
        path.chmod(0o755)


def answers(address: str) -> bool:
    """Whether a page can be had."""
    try:
        with urllib.request.urlopen(address, timeout=5) as page:  # noqa: S310 - an address of ours
            return bool(page.read())
    except OSError:
        return False


def asked(address: str, key: str, body: Mapping[str, Any] | None = None) -> tuple[int, str]:
    """Status and body of what the gateway answers to the holder of a key."""
    headers = {"Authorization": f"Bearer {key}", "Content-Type": "application/json"}
    data = json.dumps(body).encode() if body else None
    request = urllib.request.Request(address, data, headers)  # noqa: S310 - an address of ours
    try:
        with urllib.request.urlopen(request, timeout=60) as answer:  # noqa: S310 - as above
            return answer.status, answer.read().decode()
    except urllib.error.HTTPError as refused:
        return refused.code, refused.read().decode()


def audited(compose: Compose) -> str:
    """What the audit says of the run; it fails unless everything balances."""
    return compose("run", "--rm", "tools", "audit", "--run", "streamrl.toml", timeout_s=300)


@pytest.fixture(scope="module")
def compose() -> Iterator[Compose]:
    if reason := why_not():
        pytest.skip(reason)
    compose = Compose(PROJECT)
    compose("down", "--volumes", "--remove-orphans")
    before = unused_volumes()
    try:
        yield compose
    finally:
        compose.variables = {}
        compose("down", "--volumes", "--remove-orphans", profiles=("*",))
    assert unused_volumes() <= before, "no volume is left, with a name or without"
    assert not docker("volume", "ls", "--quiet", "--filter", f"name={PROJECT}_")


def test_the_image_of_processors_builds_and_is_small(compose: Compose) -> None:
    compose("build", "task", timeout_s=1800)
    assert int(docker("image", "inspect", "--format", "{{.Size}}", "streamrl:latest")[0]) < LARGEST_BYTES
    script = "import torch; assert not torch.cuda.is_available(); torch.ones(2, requires_grad=True).sum().backward()"
    compose("run", "--rm", "--no-deps", "--entrypoint", "python", "tools", "-W", "error", "-c", script)


def test_the_default_trains_the_demo_to_its_end(compose: Compose, tmp_path: Path) -> None:
    compose("up", "--detach", timeout_s=WHOLE_RUN_S)
    assert compose("wait", "run", timeout_s=WHOLE_RUN_S).split()[-1] == "0"
    assert compose.ended(*JOINED, within_s=BUSY_S) == {"run": [0], "trainer": [0], "worker": [0, 0]}
    run = compose.fetch(tmp_path) / "demo"
    summary = json.loads((run / "summary.json").read_text())
    assert summary["steps"] == 240
    assert summary["share_worked_after"] > summary["share_worked_before"]
    assert summary["accuracy_after"] > summary["accuracy_before"]
    assert "demo" in (run / "report.html").read_text()
    assert 'name = "demo"' in (run / "config.resolved.toml").read_text()
    logs = {re.sub(r"^[0-9a-f]{12}-[0-9a-f]{6}$", "a worker", path.stem) for path in (run / "logs").glob("*.log")}
    assert logs >= {"coordinator", "relay", "dispatcher", "trainer", "a worker"}
    # No more of the weights than the newest versions, whose files docs/quickstart.md lists with the rest.
    assert not (run / "weights" / ".leases").exists()
    assert (run / "checkpoints" / "step_240" / "model.safetensors").is_file()
    assert "240 steps" in audited(compose)
    # The page stays, with the run that is over.
    assert answers(f"http://127.0.0.1:{compose.ports['UI']}/")


def test_a_finished_run_says_so_and_everything_ends(compose: Compose, tmp_path: Path) -> None:
    trained = (compose.fetch(tmp_path) / "demo" / "metrics.jsonl").read_bytes()
    began = time.time()
    compose("up", "--detach")
    assert set().union(*compose.ended(*JOINED, within_s=BUSY_S).values()) == {0}
    since = f"{time.time() - began + 1:.0f}s"
    for service in JOINED:
        assert "already at step 240 of 240: nothing to train" in compose("logs", "--since", since, service)
    shutil.rmtree(tmp_path / "runs")
    assert (compose.fetch(tmp_path) / "demo" / "metrics.jsonl").read_bytes() == trained


def test_another_task_goes_on_after_every_kill_and_its_accounts_balance(compose: Compose, tmp_path: Path) -> None:
    """The emulated trial, in the volumes of the demo."""
    compose.variables = {"STREAMRL_TASK": "./images/trial"}
    compose("up", "--detach", "--scale", "worker=4")
    compose.until_step(10, within_s=BUSY_S)
    compose.crash("worker", number=2)
    compose.until_step(20, within_s=BUSY_S)
    compose.crash("trainer")
    compose.until_step(40, within_s=BUSY_S)
    compose.crash("kafka")
    compose.until_step(60, within_s=BUSY_S)
    compose.crash("run")
    compose.until_step(80, within_s=BUSY_S)
    compose("stop", timeout_s=180)
    compose("start", timeout_s=300)
    codes = compose.ended(*JOINED, within_s=BUSY_S)
    told = [line for line in compose("logs", *JOINED).splitlines() if "error: " in line]
    assert codes == {"run": [0], "trainer": [0], "worker": [0] * 4}, told
    (run,) = [path for path in compose.fetch(tmp_path).iterdir() if path.name.startswith("trial-")]
    assert json.loads((run / "summary.json").read_text())["steps"] == 200
    assert re.search(r"200 steps, lineages .*→", audited(compose)), "it went on from a checkpoint at least once"


def test_a_task_that_init_wrote_works_as_it_is_and_one_that_may_not_be_read_is_named(
    compose: Compose, tmp_path: Path
) -> None:
    task = tmp_path / "my-task"
    write_example(task, "demo", print)
    config = task / "streamrl.toml"
    config.write_text(re.sub(r"max_steps = \d+", "max_steps = 3", config.read_text()))
    for_everybody(task)
    compose.variables = {"STREAMRL_TASK": str(task)}
    weights = task / "model" / "model.safetensors"
    weights.chmod(0o600)
    refused = compose("up", "--detach", check=False) + compose("logs", "prepare", check=False)
    if os.getuid() != 10001:
        assert "(uid 10001), got model/model.safetensors with mode 0600" in refused
        assert compose.codes("prepare") == [2]
    weights.chmod(0o644)
    compose("up", "--detach")
    assert set().union(*compose.ended(*JOINED, within_s=BUSY_S).values()) == {0}
    finished = {path.parent.name.rpartition("-")[0] for path in compose.fetch(tmp_path).glob("*/summary.json")}
    assert "my-task" in finished


def test_graders_of_the_profile_grade_alone_and_a_judges_key_is_seen_by_those_alone_that_need_it(
    compose: Compose, tmp_path: Path
) -> None:
    graded = '[rewards]\nfunctions = ["format"]\ngraded = ["format"]\ngraders = 1\n'
    task = open_task(tmp_path / "graded", {"max_steps = 200": "max_steps = 40"}, graded)
    key = "sk-of-a-judge-7f3a"
    compose.variables = {"STREAMRL_TASK": str(task), "STREAMRL_REWARDS__GRADERS": "0", "OPENAI_API_KEY": key}
    compose("up", "--detach", "--scale", "grader=4", profiles=("graders",))
    codes = compose.ended(*JOINED, "grader", within_s=BUSY_S)
    assert codes == {"run": [0], "trainer": [0], "worker": [0] * 2, "grader": [0] * 4}
    said = compose("logs", profiles=("graders",))
    assert sum(int(count) for count in re.findall(r"grader ended.* graded=(\d+)", said)) >= 40 * 8 * 4
    # Of what was sampled for steps after the last one, some may be with members that heard of the end meanwhile.
    told = re.search(r"graded: ([\d,]+) trajectories, (\d+) are with the graders", audited(compose))
    assert told is not None
    assert int(told[1].replace(",", "")) >= 40 * 8 * 4
    assert int(told[2]) <= 2 * 8 * 4, "the two steps that workers may be ahead"
    holders = {name for name in OURS if any(key in json.dumps(each) for each in compose.containers(name))}
    assert holders == {"prepare", "run", "grader"}
    assert key not in said
    files = [path for path in compose.fetch(tmp_path).rglob("*") if path.is_file()]
    assert files
    assert not [path for path in files if key.encode() in path.read_bytes()]


def test_the_gateway_of_the_profile_answers_who_has_a_key_and_everything_stops_in_time(
    compose: Compose, tmp_path: Path
) -> None:
    """Beside a run that is under way; it is left while it trains."""
    task = open_task(tmp_path / "asked", {"max_steps = 200": "max_steps = 20000"})
    compose.variables = {"STREAMRL_TASK": str(task), "STREAMRL_GATEWAY__ENABLED": "true"}
    compose("up", "--detach", profiles=("gateway",))
    address = f"http://127.0.0.1:{compose.ports['GATEWAY']}"
    said = compose("run", "--rm", "tools", "gateway", "keys", "add", "alice", "--run", "streamrl.toml")
    (key,) = re.findall(r"sk-streamrl-\S+", said)
    deadline = time.monotonic() + BUSY_S
    while not answers(f"{address}/ready"):
        assert time.monotonic() < deadline, compose("logs", "--tail", "5", profiles=("gateway",))
        time.sleep(1)
    name = json.loads(asked(f"{address}/v1/models", key)[1])["data"][0]["id"]
    question = {"model": name, "messages": [{"role": "user", "content": "What is 6 times 7?"}], "max_tokens": 16}
    status, answer = asked(f"{address}/v1/chat/completions", key, question)
    assert status == 200, answer
    assert json.loads(answer)["usage"]["completion_tokens"] == 16
    assert asked(f"{address}/v1/chat/completions", "sk-streamrl-of-nobody", question)[0] == 401
    for service in ("run", "trainer", "worker", "gateway"):
        for container in compose.containers(service):
            assert (container["Config"]["User"], container["HostConfig"]["ReadonlyRootfs"]) == ("10001:10001", True)
        script = "id -u; touch /opt/streamrl/x 2>&1; grep CapEff /proc/self/status"
        seen = compose("exec", "--no-TTY", service, "sh", "-c", script, profiles=("gateway",))
        assert seen.splitlines()[0] == "10001"
        assert "Read-only file system" in seen
        assert re.search(r"CapEff:\s+0+$", seen, re.M)
    compose.until_step(5, within_s=BUSY_S)
    compose("stop", profiles=("gateway",), timeout_s=180)
    codes = {service: compose.codes(service) for service in (*JOINED, "gateway", "ui", "kafka")}
    # 137: killed, since the grace period was over.
    assert not [service for service, each in codes.items() if 137 in each], codes


def or_skip(compose: Compose, wanted: set[str], profile: str) -> None:
    """Skip where an image is neither on the engine nor in a registry that answers."""
    if wanted - images():
        said = compose("pull", "--policy", "missing", profiles=(profile,), check=False)
        if missing := wanted - images():
            pytest.skip(f"cannot be pulled here: {', '.join(sorted(missing))}: {said.strip().splitlines()[-1:]}")


def test_every_process_is_scraped_of_a_run_that_starts_after_prometheus(compose: Compose, tmp_path: Path) -> None:
    services = json.loads(compose("config", "--format", "json", profiles=("observability",)))["services"]
    or_skip(compose, {services["prometheus"]["image"]}, "observability")
    compose("down", "--volumes")
    task = open_task(tmp_path / "scraped", {"max_steps = 200": "max_steps = 20000"})
    compose.variables = {"STREAMRL_TASK": str(task)}
    compose("up", "--detach", "--no-deps", "prometheus", profiles=("observability",))
    address = f"http://127.0.0.1:{compose.ports['PROMETHEUS']}/api/v1"
    compose("up", "--detach")
    deadline, health = time.monotonic() + BUSY_S, dict[str, str]()
    while len(health) < 6 or set(health.values()) != {"up"}:
        assert time.monotonic() < deadline, health
        time.sleep(1)
        if answers(f"{address}/targets"):
            targets = json.loads(asked(f"{address}/targets", "")[1])["data"]["activeTargets"]
            health = {each["labels"]["process"]: each["health"] for each in targets}
    assert {"coordinator", "relay", "dispatcher", "trainer"} < set(health)
    (rules,) = json.loads(asked(f"{address}/rules", "")[1])["data"]["groups"]
    assert {rule["health"] for rule in rules["rules"]} == {"ok"}
    compose("stop", profiles=("observability",), timeout_s=180)


@pytest.mark.parametrize(("profile", "port", "path"), [("ui", "KAFKA_UI", "/"), ("observability", "GRAFANA", "/login")])
def test_a_profile_starts(compose: Compose, profile: str, port: str, path: str) -> None:
    or_skip(compose, set(compose("config", "--images", profiles=(profile,)).split()), profile)
    compose("up", "--detach", profiles=(profile,))
    deadline = time.monotonic() + 180
    while not answers(f"http://127.0.0.1:{compose.ports[port]}{path}"):
        assert time.monotonic() < deadline, compose("ps", "--all", profiles=(profile,))
        time.sleep(2)


def test_the_health_check_of_the_broker_costs_next_to_nothing(compose: Compose) -> None:
    compose("up", "--detach", "--wait", "kafka")
    described = json.loads(compose("config", "--format", "json"))["services"]
    before, began = compose.processor_s("kafka"), time.monotonic()
    for _ in range(10):
        compose("exec", "--no-TTY", "kafka", *described["kafka"]["healthcheck"]["test"][1:])
    # A Java runtime takes more than a second; a broker with nothing to do a few hundredths of one.
    spent = compose.processor_s("kafka") - before - 0.1 * (time.monotonic() - began)
    assert spent / 10 < 0.2


def test_the_broker_of_the_tests_listens_to_this_machine_alone_and_an_image_that_cannot_be_had_is_done_without(
    compose: Compose, monkeypatch: pytest.MonkeyPatch
) -> None:
    with ExitStack() as stack:
        address = broker_fixture.in_a_container(stack)
        assert address is not None
        (published,) = docker("ps", "--filter", f"publish={address.rpartition(':')[2]}", "--format", "{{.Ports}}")
        assert published == f"{address}->9092/tcp"
    monkeypatch.setattr(broker_fixture, "KAFKA_VERSION", "0.0.0")
    with ExitStack() as stack:
        assert broker_fixture.in_a_container(stack) is None
