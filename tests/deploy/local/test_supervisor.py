import asyncio
import os
import signal
import sys
import time
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import pytest

from streamrl.deploy.local.supervisor import Child, ChildSpec, Supervisor
from streamrl.schemas.errors import DataLossRefused, StreamRLError, Superseded, UserError
from tests.ended_children import crashing
from tests.fakes.waiting import until
from tests.pipeline.local_run import is_alive
from tests.progress import calm_s, patience

pytestmark = pytest.mark.processes

SLEEP = "import time; time.sleep(60)"
STUBBORN = "import signal, time; signal.signal(signal.SIGTERM, signal.SIG_IGN); print('up', flush=True); time.sleep(60)"


def spec(tmp_path: Path, name: str, code: str, *, essential: bool = False, optional: bool = False) -> ChildSpec:
    command = [sys.executable, "-c", code]
    return ChildSpec(name, command, tmp_path / f"{name}.log", essential=essential, optional=optional)


async def until_started(supervisor: Supervisor, name: str, *, other_than: int = 0) -> int:
    async with patience(10):
        while name not in supervisor.children or supervisor.children[name].pid == other_than:
            await asyncio.sleep(0.01)
    return supervisor.children[name].pid


async def test_the_run_is_over_when_the_essential_process_ends_well(tmp_path: Path) -> None:
    specs = [spec(tmp_path, "side", SLEEP), spec(tmp_path, "main", "pass", essential=True)]
    supervisor = Supervisor(specs, max_restarts=0, grace_s=5)
    task = asyncio.create_task(supervisor.run(asyncio.Event()))
    side = await until_started(supervisor, "side")
    async with patience(15):
        await task
    assert supervisor.finished.is_set()
    assert not is_alive(side)


async def test_the_end_waits_for_awaited_processes(tmp_path: Path) -> None:
    gate = tmp_path / "gate"
    waiting = f"import pathlib, time\nwhile not pathlib.Path({str(gate)!r}).exists(): time.sleep(0.02)"
    awaited = replace(spec(tmp_path, "evaluator", waiting, optional=True), awaited=True)
    specs = [spec(tmp_path, "side", SLEEP), awaited, spec(tmp_path, "main", "pass", essential=True)]
    supervisor = Supervisor(specs, max_restarts=0, grace_s=5)
    task = asyncio.create_task(supervisor.run(asyncio.Event()))
    await until_started(supervisor, "side")
    async with patience(15):
        while "main" not in supervisor.ended:
            await asyncio.sleep(0.01)
        await asyncio.sleep(0.05)
        assert not supervisor.finished.is_set()
        assert "side" in supervisor.children
        gate.touch()
        await task
    assert supervisor.finished.is_set()


@pytest.fixture
def _ends_come_by_the_loop() -> Iterator[None]:
    """As from Python 3.12 on; before, a thread waits for each process."""
    if sys.version_info >= (3, 12):
        yield
        return
    before, watcher = asyncio.get_child_watcher(), asyncio.PidfdChildWatcher()
    asyncio.set_child_watcher(watcher)
    yield
    watcher.close()
    asyncio.set_child_watcher(before)


@pytest.mark.usefixtures("_ends_come_by_the_loop")
async def test_a_process_that_ends_as_it_is_asked_to_keeps_its_exit_code(tmp_path: Path) -> None:
    child = await Child.start(spec(tmp_path, "side", "raise SystemExit(7)"))
    while Path(f"/proc/{child.pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z":
        time.sleep(0.01)  # and the loop sees nothing of its end
    child.terminate()
    assert await child.process.wait() == 7


async def test_a_killed_process_is_started_again(tmp_path: Path) -> None:
    stop = asyncio.Event()
    supervisor = Supervisor([spec(tmp_path, "side", SLEEP)], max_restarts=3, grace_s=5)
    task = asyncio.create_task(supervisor.run(stop))
    first = await until_started(supervisor, "side")
    os.kill(first, signal.SIGKILL)
    second = await until_started(supervisor, "side", other_than=first)
    assert supervisor.restarts == {"side": 1}
    stop.set()
    await task
    assert not is_alive(second)


async def test_processes_that_left_at_an_undone_end_are_restarted(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """One that had left by then, and one that leaves later; not one that has left long before, nor one twice."""
    monkeypatch.setattr("streamrl.deploy.local.supervisor.LEAVING_S", 1.5)
    stop = asyncio.Event()

    def waiting(name: str) -> ChildSpec:
        """Ends well once its gate is there, which it takes away."""
        gate = str(tmp_path / f"{name}.gate")
        code = f"import os, time\nwhile not os.path.exists({gate!r}): time.sleep(0.02)\nos.remove({gate!r})"
        return spec(tmp_path, name, f"{code}\nraise SystemExit({6 if name == 'coordinator' else 0})")

    trainer = spec(tmp_path, "trainer", SLEEP, essential=True)
    names = ("drained", "early", "late", "coordinator")
    supervisor = Supervisor([*map(waiting, names), trainer], max_restarts=3, grace_s=5)
    task = asyncio.create_task(supervisor.run(stop))
    first = {name: await until_started(supervisor, name) for name in (*names, "trainer")}

    async def ends(name: str) -> None:
        (tmp_path / f"{name}.gate").touch()
        await until(lambda: not is_alive(first[name]))

    await ends("drained")
    await until(lambda: "drained" in supervisor.ended)
    await asyncio.sleep(1.6)
    await ends("early")
    await until(lambda: "early" in supervisor.ended)
    await ends("coordinator")
    await ends("late")
    for name in ("early", "late", "coordinator"):
        first[name] = await until_started(supervisor, name, other_than=first[name])
    assert "drained" in supervisor.ended
    assert supervisor.children["trainer"].pid == first["trainer"]
    await ends("late")
    await until(lambda: "late" in supervisor.ended)
    stop.set()
    await task


async def test_arguments_of_the_first_start_are_not_repeated_at_a_restart(tmp_path: Path) -> None:
    stop = asyncio.Event()
    code = "import sys, time; print('given', sys.argv[1:], flush=True); time.sleep(60)"
    supervisor = Supervisor([replace(spec(tmp_path, "side", code), only_first=["--adopt"])], max_restarts=3, grace_s=5)
    task = asyncio.create_task(supervisor.run(stop))
    log = tmp_path / "side.log"
    await until(lambda: log.exists() and log.read_text().count("\n") == 1)
    os.kill(supervisor.children["side"].pid, signal.SIGKILL)
    await until(lambda: log.read_text().count("\n") == 2)
    stop.set()
    await task
    assert log.read_text().splitlines() == ["given ['--adopt']", "given []"]


async def test_a_stop_during_the_pause_before_a_restart_ends_the_run_well(tmp_path: Path) -> None:
    stop = asyncio.Event()
    supervisor = Supervisor([spec(tmp_path, "side", "raise SystemExit(1)")], max_restarts=9, grace_s=5)
    task = asyncio.create_task(supervisor.run(stop))
    async with patience(30):
        while supervisor.restarts.get("side", 0) < 2 or supervisor.children:
            await asyncio.sleep(0.01)
        stop.set()
        await task


async def test_a_restart_is_logged_with_its_reason(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    stop = asyncio.Event()
    code = "print('error: a bad day', flush=True); raise SystemExit(1)"
    supervisor = Supervisor([spec(tmp_path, "side", code)], max_restarts=9, grace_s=5)
    task = asyncio.create_task(supervisor.run(stop))
    async with patience(10):
        while not supervisor.restarts:
            await asyncio.sleep(0.01)
    stop.set()
    await task
    assert "error: a bad day" in capsys.readouterr().out


async def test_a_user_error_ends_the_run_with_its_last_line(tmp_path: Path) -> None:
    bad = spec(tmp_path, "bad", "print('noise'); print('error: no such model'); raise SystemExit(2)")
    supervisor = Supervisor([spec(tmp_path, "side", SLEEP), bad], max_restarts=3, grace_s=5)
    with pytest.raises(UserError, match="bad ended with code 2: error: no such model"):
        await supervisor.run(asyncio.Event())
    assert not supervisor.children


async def test_a_crash_loop_ends_the_run_with_one_line_that_says_all(tmp_path: Path) -> None:
    code = "print('error: no room'); print('bye'); raise SystemExit(1)"
    supervisor = Supervisor([spec(tmp_path, "bad", code)], max_restarts=1, grace_s=5)
    with pytest.raises(StreamRLError) as raised:
        await supervisor.run(asyncio.Event())
    expected = f"bad ended with code 1, 2 times in a row: error: no room; its log is {tmp_path / 'bad.log'}"
    assert (str(raised.value), raised.value.exit_code) == (expected, 1)


async def test_refused_data_loss_ends_the_run_with_its_line_and_its_exit_code(tmp_path: Path) -> None:
    bad = spec(tmp_path, "bad", "print('error: offsets 3 to 9 are gone'); raise SystemExit(4)")
    with pytest.raises(DataLossRefused, match="offsets 3 to 9 are gone") as raised:
        await Supervisor([bad], max_restarts=3, grace_s=5).run(asyncio.Event())
    assert raised.value.exit_code == 4


async def test_a_superseded_process_is_not_restarted_and_the_run_goes_on(tmp_path: Path) -> None:
    twin = spec(tmp_path, "twin", "print('error: superseded'); raise SystemExit(3)")
    main = spec(tmp_path, "main", "import time; time.sleep(1)", essential=True)
    supervisor = Supervisor([twin, main], max_restarts=3, grace_s=5)
    await supervisor.run(asyncio.Event())
    assert supervisor.finished.is_set()
    assert supervisor.restarts == {}


def trainer(tmp_path: Path, name: str, leads: str, stands_by: str) -> ChildSpec:
    both = (spec(tmp_path, name, code, essential=True) for code in (leads, stands_by))
    leading, standing_by = both
    return replace(leading, standby=standing_by.command)


WAIT_FOR_SIGNAL = (
    "import signal, sys, time\n"
    "signal.signal(signal.SIGURG, lambda *_: (print('took over', flush=True), sys.exit(0)))\n"
    "print('ready', flush=True)\n"
    "time.sleep(60)"
)


async def test_a_superseded_trainer_stands_by(tmp_path: Path) -> None:
    leads = "print('error: superseded'); raise SystemExit(3)"
    specs = [spec(tmp_path, "worker", SLEEP), trainer(tmp_path, "trainer", leads, "print('stood by', flush=True)")]
    supervisor = Supervisor(specs, max_restarts=0, grace_s=5)
    async with patience(30):
        await supervisor.run(asyncio.Event())
    assert "stood by" in (tmp_path / "trainer.log").read_text()
    assert supervisor.finished.is_set()
    assert "worker" not in supervisor.restarts


@pytest.mark.parametrize("trainer_first", [True, False])
async def test_a_run_that_was_taken_over_whole_ends(tmp_path: Path, trainer_first: bool) -> None:
    late = "import time; time.sleep(1); print('error: superseded'); raise SystemExit(3)"
    early = late.replace("time.sleep(1); ", "")
    dispatcher = spec(tmp_path, "dispatcher", late if trainer_first else early)
    leads = early if trainer_first else late
    specs = [trainer(tmp_path, "trainer", leads, SLEEP), replace(dispatcher, is_single=True)]
    with pytest.raises(Superseded):
        async with patience(30):
            await Supervisor(specs, max_restarts=3, grace_s=5).run(asyncio.Event())


async def test_a_standby_hears_at_once_that_the_leader_died(tmp_path: Path) -> None:
    ready = spec(tmp_path, "standby-0", WAIT_FOR_SIGNAL, essential=True)
    leads = trainer(tmp_path, "trainer", SLEEP, SLEEP)
    supervisor = Supervisor([leads, replace(ready, standby=ready.command)], max_restarts=3, grace_s=5)
    task = asyncio.create_task(supervisor.run(asyncio.Event()))
    leading = await until_started(supervisor, "trainer")
    async with patience(30):
        while not ready.log_path.exists() or "ready" not in ready.log_path.read_text():
            await asyncio.sleep(0.02)
        os.kill(leading, signal.SIGKILL)
        await task
    assert "took over" in ready.log_path.read_text()
    assert supervisor.finished.is_set()


async def test_the_run_ends_when_its_essential_process_is_superseded(tmp_path: Path) -> None:
    main = spec(tmp_path, "main", "print('error: superseded'); raise SystemExit(3)", essential=True)
    with pytest.raises(Superseded, match="superseded"):
        await Supervisor([spec(tmp_path, "side", SLEEP), main], max_restarts=3, grace_s=5).run(asyncio.Event())


@pytest.mark.parametrize("is_single", [False, True])
async def test_two_supervisors_with_the_same_process_do_not_end_each_others_for_ever(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, is_single: bool
) -> None:
    """Each process takes a token and ends superseded when the token changed hands."""
    monkeypatch.setattr("streamrl.deploy.local.supervisor.TRANSIENT_S", 0.0)
    token = tmp_path / "token"
    claim = f"""
import os, pathlib, sys, time
token = pathlib.Path({str(token)!r})
token.write_text(str(os.getpid()))
while token.read_text() in ("", str(os.getpid())):
    time.sleep(0.02)
sys.exit(3)
"""
    stop = asyncio.Event()
    specs = [replace(spec(tmp_path, f"w0-{number}", claim), is_single=is_single) for number in range(2)]
    both = [Supervisor([each], max_restarts=5, grace_s=5) for each in specs]
    tasks = [asyncio.create_task(supervisor.run(stop)) for supervisor in both]
    async with patience(15):
        while sum(len(supervisor.superseded) for supervisor in both) != 1:
            await asyncio.sleep(0.02)
    await asyncio.sleep(0.5)
    assert sum(len(supervisor.children) for supervisor in both) == 1
    restarts = [sum(supervisor.restarts.values()) for supervisor in both]
    assert sorted(restarts) == [1, 1] if is_single else restarts == [0, 0]
    stop.set()
    await asyncio.gather(*tasks)


async def test_a_single_process_fenced_without_a_successor_is_restarted(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("streamrl.deploy.local.supervisor.TRANSIENT_S", 0.0)
    been = tmp_path / "been"
    code = (
        f"import pathlib, sys\nbeen = pathlib.Path({str(been)!r})\nsys.exit(0 if been.exists() else been.touch() or 3)"
    )
    only = replace(spec(tmp_path, "dispatcher", code), is_single=True)
    supervisor = Supervisor([only, spec(tmp_path, "main", "import time; time.sleep(2)", essential=True)], 3, 5)
    await supervisor.run(asyncio.Event())
    assert (supervisor.restarts, supervisor.superseded) == ({"dispatcher": 1}, {})


async def test_an_optional_process_that_cannot_be_kept_alive_does_not_end_the_run(tmp_path: Path) -> None:
    optional = spec(tmp_path, "bad", "raise SystemExit(2)", optional=True)
    main = spec(tmp_path, "main", "import time; time.sleep(1)", essential=True)
    supervisor = Supervisor([optional, main], max_restarts=0, grace_s=5)
    await supervisor.run(asyncio.Event())
    assert supervisor.finished.is_set()


async def test_a_process_that_ignores_sigterm_is_killed_when_the_grace_period_ends(tmp_path: Path) -> None:
    stop = asyncio.Event()
    stubborn = spec(tmp_path, "stubborn", STUBBORN)
    supervisor = Supervisor([stubborn], max_restarts=0, grace_s=0.5)
    task = asyncio.create_task(supervisor.run(stop))
    pid = await until_started(supervisor, "stubborn")
    async with patience(10):
        while "up" not in stubborn.log_path.read_text():
            await asyncio.sleep(0.01)
    began, calm = time.monotonic(), calm_s()
    stop.set()
    await task
    assert time.monotonic() - began > 0.4
    assert calm_s() - calm < 5
    assert not is_alive(pid)


DRAINS = (
    "import signal, sys, time\n"
    "signal.signal(signal.SIGTERM, lambda *_: sys.exit({code}))\n"
    "print('up', flush=True)\n"
    "while True: time.sleep(0.05)"
)


async def stopped(tmp_path: Path, code: str, grace_s: float = 5) -> Supervisor:
    """After it was up and then asked to end."""
    child = spec(tmp_path, "side", code)
    supervisor, stop = Supervisor([child], max_restarts=0, grace_s=grace_s), asyncio.Event()
    task = asyncio.create_task(supervisor.run(stop))
    await until(lambda: child.log_path.exists() and "up" in child.log_path.read_text())
    stop.set()
    await task
    return supervisor


async def test_a_process_stopped_by_an_outside_signal_is_restarted(tmp_path: Path) -> None:
    """Also the essential one, whose good end would be the run's."""
    child = replace(spec(tmp_path, "main", DRAINS.format(code=143)), essential=True)
    supervisor, stop = Supervisor([child], max_restarts=3, grace_s=5), asyncio.Event()
    task = asyncio.create_task(supervisor.run(stop))
    first = await until_started(supervisor, "main")
    await until(lambda: child.log_path.exists() and "up" in child.log_path.read_text())
    os.kill(first, signal.SIGTERM)
    second = await until_started(supervisor, "main", other_than=first)
    assert not supervisor.finished.is_set()
    assert supervisor.restarts == {"main": 1}
    await until(lambda: child.log_path.read_text().count("up") == 2)
    supervisor.children["main"].terminate()
    async with patience(10):
        await task
    assert not is_alive(second)
    assert (supervisor.finished.is_set(), supervisor.restarts, supervisor.crashes) == (True, {"main": 1}, [])


@pytest.mark.parametrize("code", [0, 143])
async def test_a_process_that_drains_when_asked_is_no_crash(tmp_path: Path, code: int) -> None:
    assert (await stopped(tmp_path, DRAINS.format(code=code))).crashes == []


async def test_a_crash_while_stopping_is_reported(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """By a signal that it was not sent, and by an error."""
    dies = DRAINS.format(code=0).replace("import signal", "import os, signal")
    dies = dies.replace("sys.exit(0)", "os.kill(os.getpid(), signal.SIGSEGV)")
    with crashing(signal.SIGSEGV):
        supervisor = await stopped(tmp_path, dies)
    where = f"its log is {tmp_path / 'side.log'}"
    assert supervisor.crashes == [f"side ended with signal SIGSEGV while it was stopped; {where}"]
    assert "ended='signal SIGSEGV'" in capsys.readouterr().out.replace('"', "'")
    fails = DRAINS.format(code=1).replace("lambda *_: ", "lambda *_: print('error: no broker', flush=True) or ")
    supervisor = await stopped(tmp_path / "other", fails)
    where = where.replace("side.log", "other/side.log")
    assert supervisor.crashes == [f"side ended with code 1 while it was stopped: error: no broker; {where}"]


async def test_one_that_had_to_be_killed_is_said_and_is_no_crash(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert (await stopped(tmp_path, STUBBORN, grace_s=0.3)).crashes == []
    (line,) = [line for line in capsys.readouterr().out.splitlines() if "process killed" in line]
    assert str(tmp_path / "side.log") in line


async def test_the_log_of_a_process_that_a_signal_ended_is_named(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    supervisor, stop = Supervisor([spec(tmp_path, "side", SLEEP)], max_restarts=3, grace_s=5), asyncio.Event()
    task = asyncio.create_task(supervisor.run(stop))
    os.kill(await until_started(supervisor, "side"), signal.SIGSEGV)
    await until(lambda: supervisor.restarts == {"side": 1})
    stop.set()
    await task
    (line,) = [line for line in capsys.readouterr().out.splitlines() if "process died" in line]
    assert "signal SIGSEGV" in line
    assert str(tmp_path / "side.log") in line


async def test_one_that_is_just_being_started_is_ended_as_well(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    stop, begun, start = asyncio.Event(), asyncio.Event(), Child.start.__func__  # type: ignore[attr-defined]

    async def slowly(spec: ChildSpec) -> Child:
        child: Child = await start(Child, spec)
        begun.set()
        await asyncio.sleep(0.2)
        pids.append(child.pid)
        return child

    pids: list[int] = []
    monkeypatch.setattr(Child, "start", slowly)
    supervisor = Supervisor([spec(tmp_path, "side", SLEEP)], max_restarts=3, grace_s=5)
    task = asyncio.create_task(supervisor.run(stop))
    await begun.wait()
    stop.set()
    await task
    assert [is_alive(pid) for pid in pids] == [False]
