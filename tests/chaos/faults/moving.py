"""Kills where something changes hands: completions that go on elsewhere, groups that move, weights that are copied.

Crash points say where exactly a process dies; the other faults take it from outside while it is at work on that.
"""

import asyncio
import time
from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import asynccontextmanager
from functools import partial
from pathlib import Path

from streamrl.bus.kafka.bus import KafkaBus
from streamrl.bus.kafka.settings import KafkaSettings
from streamrl.bus.port import message_of
from streamrl.schemas.messages import Message
from streamrl.schemas.topics import WORK_ORDERS
from streamrl.schemas.trajectories import ReleaseOrder, WorkOrder
from streamrl.schemas.weights import INCOMING_PREFIX
from tests.chaos.crashing.elsewhere import CHUNKS, CONTINUED, COPIED, LET_GO, TAKEN_BACK
from tests.chaos.crashing.lives import missing, with_points
from tests.chaos.crashing.points import CrashPoint
from tests.chaos.faults.plan import Event, Fault
from tests.chaos.runs.chaos_run import ChaosRun
from tests.chaos.runs.fleet import Fleet
from tests.chaos.runs.setting import COPIES, REPACKED, WITHOUT_A_MODEL

POINTS_S = 120.0
SEEN_S = 60.0
KILLS = 2
"""Of whoever has a part in it, one after the other."""
OF_TOKENS = {**WITHOUT_A_MODEL, "training": {**WITHOUT_A_MODEL["training"], "max_steps": 80}}
OF_TAILS = {
    **WITHOUT_A_MODEL,
    "run": {"workers": 3},
    "loop": {
        "mode": "trajectory_async",
        "max_completion_length": 3000,
        "bucket_boundaries": [500],
        "groups_per_step": 6,
        "max_staleness": 6,
    },
    "generation": {**WITHOUT_A_MODEL["generation"], **REPACKED["generation"], "max_num_seqs": 8},
    "dispatch": REPACKED["dispatch"],
    "training": {**WITHOUT_A_MODEL["training"], "max_steps": 28},
    "emulation": {"time_scale": 4.0},
    "emulation.lengths": {"median_tokens": 150.0, "p99_over_median": 20.0},
}
"""A step is as many completions as there are slots. Some go on for seconds, and keep a worker from new weights."""
SLOW_COPIES = {"relay": {"host": "127.0.0.2", "max_bytes_per_s": 300_000}}
"""Whoever asks from another address than the relay's own is of another host: a version takes a third of a second."""


def die_at(run: ChaosRun, points: Sequence[CrashPoint], names: str) -> None:
    """Let those processes die whose names begin like this, each time another one if they are several."""
    folder = _folder(run, names)
    run.fleet = Fleet(
        [with_points(spec, folder, points) if spec.name.startswith(names) else spec for spec in run.fleet.specs]
    )


def _folder(run: ChaosRun, names: str) -> Path:
    return run.setting.directory.path / "points" / names


async def all_points(run: ChaosRun, event: Event) -> float:
    """Wait until somebody has died at each of the points."""
    folder = _folder(run, event.target)
    first = missing(folder)
    await run.until(lambda: not missing(folder), f"end at each of {first}", POINTS_S)
    return time.time()


async def kill_at_work(run: ChaosRun, event: Event, is_wanted: Callable[[Message], bool]) -> float:
    """SIGKILL, as soon as the topic of orders says that its turn has come, and once more after that."""
    async with _orders(run) as orders:
        for _ in range(KILLS):
            message = await asyncio.wait_for(_first(orders, is_wanted), SEEN_S)
            name = event.target if event.target == "dispatcher" else getattr(message, "worker_id", "")
            run.fleet.kill(await run.fleet.living(name))
    return time.time()


async def kill_continuing(run: ChaosRun, event: Event) -> float:
    """A worker is killed, and then whoever is asked to go on with what it had."""
    run.fleet.kill(await run.fleet.living(event.target))
    return await kill_at_work(run, event, is_continued)


def is_release(message: Message) -> bool:
    return isinstance(message, ReleaseOrder)


def is_moved(message: Message) -> bool:
    return isinstance(message, WorkOrder) and message.moves > 0


def is_continued(message: Message) -> bool:
    return isinstance(message, WorkOrder) and bool(message.partials)


@asynccontextmanager
async def _orders(run: ChaosRun) -> AsyncIterator[AsyncIterator[Message]]:
    """What the dispatcher sends from now on."""
    bus = KafkaBus(KafkaSettings(bootstrap_servers=run.broker.address))
    topic = WORK_ORDERS.full_name(run.setting.name)
    subscription = await bus.subscribe([topic], client_id="chaos", start="latest")

    async def messages() -> AsyncIterator[Message]:
        while True:
            for record in await subscription.poll(timeout_s=0.2):
                if (message := message_of(record)) is not None:
                    yield message

    try:
        yield messages()
    finally:
        await subscription.close()


async def _first(messages: AsyncIterator[Message], is_wanted: Callable[[Message], bool]) -> Message:
    async for message in messages:
        if is_wanted(message):
            return message
    raise AssertionError("it goes on for ever")


async def kill_copies_mid_transfer(run: ChaosRun, _event: Event) -> float:
    """While a version is on its way to the relay that holds copies."""
    store = run.setting.directory.path / COPIES
    for _ in range(KILLS):
        pid = await run.fleet.living(COPIES)
        await _version_on_its_way(run, store)
        run.fleet.kill(pid)
    return time.time()


async def _version_on_its_way(run: ChaosRun, store: Path) -> None:
    known = set(store.rglob(f"{INCOMING_PREFIX}*"))
    await run.until(lambda: bool(set(store.rglob(f"{INCOMING_PREFIX}*")) - known), "version on its way", SEEN_S)


def _points(name: str, points: Sequence[CrashPoint], target: str, settings: object, cases: tuple[str, ...]) -> Fault:
    return Fault(
        name,
        all_points,
        cases,
        (target,),
        settings=settings,  # type: ignore[arg-type]
        prepare=partial(die_at, points=points, names=target),
        mixes=False,
        copies=target == COPIES,
    )


FAULTS = (
    _points("chunk-points", (*CHUNKS, *CONTINUED), "worker", OF_TOKENS, ("B7",)),
    _points("let-go-points", LET_GO, "worker", OF_TAILS, ("B7a",)),
    _points("take-back-points", TAKEN_BACK, "dispatcher", OF_TAILS, ("B7a",)),
    _points("copy-points", COPIED, COPIES, {"training": {"max_steps": 60}}, ("D2a",)),
    Fault("copies-kill", kill_copies_mid_transfer, ("D2a",), settings=SLOW_COPIES, copies=True),
    Fault("continuing-kill", kill_continuing, ("B7",), ("worker-0", "worker-1"), settings=OF_TOKENS),
    Fault("source-kill", partial(kill_at_work, is_wanted=is_release), ("B7a",), settings=OF_TAILS, mixes=False),
    Fault("target-kill", partial(kill_at_work, is_wanted=is_moved), ("B7a",), settings=OF_TAILS, mixes=False),
    Fault(
        "mover-kill",
        partial(kill_at_work, is_wanted=is_release),
        ("B7a",),
        ("dispatcher",),
        settings=OF_TAILS,
        mixes=False,
    ),
)
