import asyncio
import json
import os
import resource
import socket
import subprocess
import sys
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager, contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import msgpack
import pytest
from pydantic import ValidationError
from structlog.testing import capture_logs

from streamrl.producers.rewards.runner import RewardRunner
from streamrl.producers.rewards.sandbox import RewardConfinement, environment_for
from streamrl.producers.rewards.settings import RewardSettings
from tests.producers.rewards.test_runner import HERE, ROOT, request
from tests.progress import patience

pytestmark = pytest.mark.processes

CANARY = "canary-4711"
needs_namespaces = pytest.mark.skipif(
    subprocess.run(["unshare", "--user", "--net", "true"], capture_output=True, check=False).returncode != 0,
    reason="the kernel, or the container's seccomp profile, forbids user namespaces",
)


@asynccontextmanager
async def hostile(**settings: Any) -> AsyncIterator[RewardRunner]:
    runner = RewardRunner(RewardSettings(functions=(f"{HERE}:hostile",), timeout_s=20, **settings))
    await runner.start()
    try:
        yield runner
    finally:
        await runner.close()


async def outcome(runner: RewardRunner, text: str) -> str:
    """The reason of a failed reward, or its number."""
    scores = await runner.score(request(text))
    return scores.errors.get("hostile") or str(scores.rewards["hostile"])


async def test_reward_processes_get_no_secrets_and_only_variables_that_programs_need_or_the_user_names(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name in ("STREAMRL_KAFKA__SASL_PLAIN_PASSWORD", "WANDB_API_KEY", "AWS_SECRET_ACCESS_KEY", "JUDGE_KEY"):
        monkeypatch.setenv(name, f"{CANARY}-{name}")
    monkeypatch.setenv("OMP_NUM_THREADS", "3")
    seen = tmp_path / "environment.json"
    with capture_logs() as logs:
        async with hostile(environment=("JUDGE_KEY", "NOT_THERE")) as runner:
            await outcome(runner, f"environment {seen}")
            async with patience(10):
                while "OMP_NUM_THREADS" not in str(logs):
                    await asyncio.sleep(0.01)
    environment = json.loads(seen.read_text())
    assert environment["OMP_NUM_THREADS"] == "3"
    assert environment["PATH"] == os.environ["PATH"]
    assert [name for name, value in environment.items() if CANARY in value] == ["JUDGE_KEY"]
    assert str(logs).count(CANARY) == 1


def confine_files(monkeypatch: pytest.MonkeyPatch) -> None:
    """Limit reward processes to small files, and to few open ones."""
    confined = RewardSettings.confinement_of

    def smaller(settings: RewardSettings, function: str) -> RewardConfinement:
        return replace(confined(settings, function), max_file_bytes=1 << 20, max_open_files=64)

    monkeypatch.setattr(RewardSettings, "confinement_of", smaller)


async def test_limits_are_set_before_user_code_runs(monkeypatch: pytest.MonkeyPatch) -> None:
    confine_files(monkeypatch)
    runner = RewardRunner(RewardSettings(functions=(f"{HERE}:open_files",), timeout_s=20))
    await runner.start()
    try:
        assert (await runner.score(request("a"))).rewards == {"open_files": 64.0}
    finally:
        await runner.close()


@needs_namespaces
async def test_a_hostile_reward_hits_limits_and_only_its_own_call_fails(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    confine_files(monkeypatch)
    with socket.create_server(("127.0.0.1", 0)) as server:
        port = server.getsockname()[1]
        async with hostile(network=False, max_processes=32, max_memory_bytes=1 << 30) as runner:
            assert await outcome(runner, f"connect {port}") == "OSError: [Errno 101] Network is unreachable"
            assert await outcome(runner, "fork 200") == "BlockingIOError: [Errno 11] Resource temporarily unavailable"
            assert await outcome(runner, f"allocate {2 << 30}") == "MemoryError"
            assert await outcome(runner, f"write {tmp_path / 'huge'} {2 << 20}") == "OSError: [Errno 27] File too large"
            assert (await outcome(runner, "open 100")).startswith("OSError: [Errno 24] Too many open files")
            assert (await outcome(runner, "of_the_worker")).startswith("PermissionError")
            # As before: few processes, little memory, small files.
            assert await outcome(runner, "fork 4") == "6.0"
            assert await outcome(runner, f"write {tmp_path / 'small'} {1 << 10}") == str(
                float(len(f"write {tmp_path / 'small'} 1024"))
            )
            assert await outcome(runner, "abc") == "3.0"
        assert (tmp_path / "small").stat().st_size == 1 << 10
        # Not counted as one of the sandbox's: limits are those of the reward process alone.
        assert resource.getrlimit(resource.RLIMIT_FSIZE)[0] == resource.RLIM_INFINITY


async def test_with_a_network_a_reward_reaches_its_judge_and_leaves_no_core() -> None:
    with socket.create_server(("127.0.0.1", 0)) as server:
        async with hostile() as runner:
            assert await outcome(runner, f"connect {server.getsockname()[1]}") == "13.0"
            process = runner._queues[0]._process
            assert process is not None
            limits = Path(f"/proc/{process.process.pid}/limits").read_text().splitlines()
    hard = {line[:25].strip(): line[25:].split()[1] for line in limits[1:]}
    assert hard["Max core file size"] == "0"
    assert hard["Max file size"] == str(16 << 30)


@needs_namespaces
@pytest.mark.parametrize("wanted", [{"network": False}, {"max_processes": 32}])
def test_a_kernel_that_forbids_namespaces_gives_one_line_at_the_start(wanted: dict[str, object]) -> None:
    child = [sys.executable, "-m", "streamrl.producers.rewards.child", f"{HERE}:hostile", "1", "{}", json.dumps(wanted)]
    # In a namespace that may have none below it, as an administrator forbids them.
    forbid = 'echo 0 > /proc/sys/user/max_user_namespaces && exec "$@"'
    command = ["unshare", "--user", "--map-root-user", "sh", "-c", forbid, "sh", *child]
    with talking_to(command) as answers:
        kind, reason = next(answers)
    assert kind == "failed"
    assert reason.startswith("expected a kernel that gives reward processes a user namespace, for rewards.")
    assert next(iter(wanted)) in reason
    assert "got: the limit user.max_user_namespaces is reached; allow user namespaces" in reason


@needs_namespaces
def test_without_root_a_reward_process_loses_its_network_as_well() -> None:
    limits = {"network": False, "max_processes": 32}
    child = [sys.executable, "-m", "streamrl.producers.rewards.child", f"{HERE}:hostile", "5", "{}", json.dumps(limits)]
    task = {"prompt": "p", "dataset": "d", "columns": {}, "text": "connect 9", "ids": b""}
    call = msgpack.packb((7, msgpack.packb(task)))
    with talking_to(["unshare", "--user", "--map-user=1000", "--map-group=1000", *child], call) as answers:
        assert next(answers) == ["ready", False]
        assert next(answers) == [7, None, "OSError: [Errno 101] Network is unreachable"]


@contextmanager
def talking_to(command: list[str], call: bytes = b"") -> Iterator[Iterator[Any]]:
    """What a reward process answers. In a session of its own: at the end of its calls it ends its whole group."""
    pipe = subprocess.PIPE
    with subprocess.Popen(command, stdin=pipe, stdout=pipe, cwd=ROOT, start_new_session=True, bufsize=0) as process:
        assert process.stdin is not None
        process.stdin.write(call)
        yield iter(msgpack.Unpacker(process.stdout, read_size=1))
        process.stdin.close()


def test_names_that_could_hand_over_our_own_secrets_are_refused() -> None:
    with pytest.raises(ValidationError, match="StreamRL's own"):
        RewardSettings(environment=("STREAMRL_KAFKA__SASL_PLAIN_PASSWORD",))
    with pytest.raises(ValidationError, match="expected names of variables") as caught:
        RewardSettings(environment=(f"KEY={CANARY}",))
    assert CANARY not in str(caught.value)
    assert environment_for({"LC_ALL": "C", "HF_TOKEN": CANARY}, ()) == {"LC_ALL": "C"}
