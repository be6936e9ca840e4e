"""`streamrl split`: lets policies besides the served one sample a share of a run's groups; checks the command first.

The coordinator ignores an impossible split without a word to the operator. So this command checks it and says why.
"""

import asyncio
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from streamrl.bus.history import BusHistory
from streamrl.bus.port import message_of
from streamrl.deploy.wiring.broker import send_command
from streamrl.inspection.diagnostics.connect import RunConnection, connect
from streamrl.inspection.diagnostics.tail import newest_records
from streamrl.inspection.source import RUNS, directory_of
from streamrl.observability.run_state.state import is_alive
from streamrl.policies.role_attaching import InstanceStatus, read_instances
from streamrl.schemas.control import ArmShare
from streamrl.schemas.errors import UserError
from streamrl.schemas.identifiers import INSTANCES, SERVED_ARM
from streamrl.schemas.reports import Heartbeat, WorkerState
from streamrl.schemas.topics import HEARTBEATS
from streamrl.schemas.weights import complete_versions, manifest_in

RECENT = 2000
"""Number of newest heartbeats that show which workers are alive: ten seconds of two hundred workers."""


def split(run: Path, servers: str | None, shares: Mapping[str, float], reason: str) -> str:
    """Order a split of a run's groups, or with no shares its end; returns one line that confirms it.

    Raises:
        UserError: there is no such run, an arm is unknown, gone, or of another model, or there are too few workers.
    """
    connection = asyncio.run(connect(run, servers).with_run())
    if shares:
        _check_shares(shares)
        instances, workers = asyncio.run(_read_members(connection))
        _check_arms(shares, instances, connection.run)
        _check_workers(shares, workers)
        _check_shapes(shares, run)
    arms = tuple(ArmShare(policy=name, share=share) for name, share in sorted(shares.items()))
    send_command(connection.kafka, connection.run, "split", reason, shares=arms)
    ordered = ", ".join(f"{arm.policy} {arm.share:.4g}" for arm in arms) or "off, all is the served policy's"
    return f"asked run {connection.run} at {connection.address} for a split: {ordered}"


def shares_in(texts: Sequence[str]) -> dict[str, float]:
    """The shares that ``NAME=SHARE`` name.

    Raises:
        UserError: a text has another form, or a name comes twice.
    """
    shares: dict[str, float] = {}
    for text in texts:
        name, equals, share = text.partition("=")
        try:
            value = float(share)
        except ValueError:
            equals = ""
        if not equals or not name:
            raise UserError(f"expected NAME=SHARE such as rloo-1=0.25, got {text!r}")
        if name in shares:
            raise UserError(f"expected each arm once, got {name!r} again")
        shares[name] = value
    return shares


def _check_shares(shares: Mapping[str, float]) -> None:
    for name, share in shares.items():
        if not 0.0 < share <= 1.0:
            raise UserError(f"expected a share above 0 and up to 1 for {name!r}, got {share:g}")
    if (total := sum(shares.values())) > 1.0 + 1e-9:
        raise UserError(
            f"expected shares that add up to at most 1, since the served policy has the rest, got {total:g}"
        )


async def _read_members(connection: RunConnection) -> tuple[list[InstanceStatus], list[Heartbeat]]:
    """The instances, and the newest heartbeat of each living worker."""
    history = BusHistory(connection.bus, client_id="streamrl-split")
    topic = HEARTBEATS.full_name(connection.run)
    beats: dict[str, Heartbeat] = {}
    for record in await newest_records(history, topic, await history.extents(topic), RECENT):
        if isinstance(beat := message_of(record), Heartbeat):
            beats[beat.worker_id] = beat
    now = time.time()
    living = [beat for beat in beats.values() if is_alive(beat, now) and beat.state is not WorkerState.DRAINING]
    return await read_instances(connection), living


def _check_arms(shares: Mapping[str, float], instances: Sequence[InstanceStatus], run: str) -> None:
    known = {one.name: one for one in instances if one.mode != "detached"}
    for name in shares:
        if name == SERVED_ARM:
            raise UserError(f"expected another name than {SERVED_ARM!r}, which displays use for the served policy")
        if name not in known:
            attached = ", ".join(sorted(known)) or "none"
            raise UserError(f"expected an instance attached to run {run}, got {name!r}; attached are: {attached}")
        if known[name].served:
            raise UserError(
                f"expected an instance that is not served, got {name!r}, which is and gets the rest of the groups"
            )
        if not known[name].alive:
            raise UserError(
                f"expected {name!r} to be running before workers follow it, got no heartbeat; "
                f"start it with `streamrl attach {name} --run {run}`"
            )


def _check_workers(shares: Mapping[str, float], workers: Sequence[Heartbeat]) -> None:
    arms = len(shares) + (sum(shares.values()) < 1.0 - 1e-9)
    if len(workers) < arms:
        raise UserError(
            f"expected a worker for each of {arms} arms, including the served policy's, got {len(workers)}; start more "
            "(`streamrl worker`, or --run.workers), or name fewer arms"
        )


def _check_shapes(shares: Mapping[str, float], run: Path) -> None:
    directory = directory_of(run)
    if directory is None:
        raise UserError(
            f"expected a run's directory, or its name under {RUNS}/, got {run}; run this on the machine of the run"
        )
    served = _shape_of(directory.path / "weights", "the served policy")
    for name in shares:
        arm = _shape_of(directory.path / INSTANCES / name / "weights", name)
        if different := sorted(key for key in served.keys() | arm.keys() if served.get(key) != arm.get(key)):
            key = different[0]
            raise UserError(
                f"expected {name!r} to have the served policy's model, so that a worker can take the weights of both, "
                f"got {key}: {_shortened(arm.get(key))} instead of {_shortened(served.get(key))}"
                + (f" and {len(different) - 1} more" if different[1:] else "")
            )


def _shortened(value: Any) -> str:
    text = "nothing" if value is None else str(value)
    return text if len(text) <= 60 else f"{text[:60]}…"


def _shape_of(store: Path, whose: str) -> dict[str, Any]:
    """What must be equal for one engine to take two policies' weights: the tensors by name, and an adapter's base.

    Raises:
        UserError: there are no weights yet, or they cannot be read.
    """
    versions = complete_versions(store)
    manifest = manifest_in(store / str(versions[-1])) if versions else None
    if manifest is None:
        raise UserError(f"expected weights of {whose} in {store}, got none yet; try again after its first export")
    shape: dict[str, Any] = {"adapter": None}
    if manifest.adapter is not None:
        shape |= {"adapter": manifest.adapter.base_sha256, "rank": manifest.adapter.rank}
    for file in manifest.files:
        if file.name.endswith(".safetensors"):
            shape |= _tensors_in(store / str(manifest.version) / file.name)
    return shape


def _tensors_in(path: Path) -> dict[str, Any]:
    """Type and shape of each tensor, from the file's header.

    Raises:
        UserError: the file is damaged, or was deleted in the meantime.
    """
    from safetensors import SafetensorError, safe_open

    try:
        # numpy is the lightest framework to load, and the header also names types that numpy lacks.
        with safe_open(path, framework="numpy") as file:
            found = {name: file.get_slice(name) for name in file.keys()}  # noqa: SIM118
            return {name: (one.get_dtype(), one.get_shape()) for name, one in found.items()}
    except (SafetensorError, OSError) as error:
        raise UserError(f"expected a readable safetensors file, got {path}: {error}; try again") from error
