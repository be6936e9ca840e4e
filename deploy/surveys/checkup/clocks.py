"""Compares this machine's clock with the stamps of records that are being written. Writes none itself."""

import asyncio
import time

from deploy.bus.cluster.facts import ask_cluster
from deploy.inspection.bus_history import BusHistory
from deploy.surveys.attachment import CLIENT_ID, Attachment
from deploy.surveys.checkup.findings import Finding, ok, warn
from deploy.surveys.tailing.following import newest_records
from schemas.errors import BusError
from schemas.ports.bus import Record
from schemas.wire.topics import HEARTBEATS

LISTEN_S = 3.0
LOOK_EVERY_S = 0.5
TOLERATED_S = 2.0


async def check_clocks(attachment: Attachment) -> Finding:
    """Workers beat every second: a heartbeat that just came should be stamped now."""
    try:
        fresh, skew_s = await _skew(attachment)
        by_broker = await _stamped_by_broker(attachment)
    except BusError as error:
        return warn("clocks", f"not measured: {error}", "see the broker's finding")
    who = "the broker" if by_broker else "a worker"
    if skew_s is None or (not fresh and skew_s <= TOLERATED_S):
        return ok("clocks", "not measured: no worker beats now, and a broker tells its time only by records")
    detail = f"{who} stamps records {abs(skew_s):.1f} s {'ahead of' if skew_s > 0 else 'behind'} this machine's clock"
    if abs(skew_s) <= TOLERATED_S:
        return ok("clocks", detail)
    return warn("clocks", detail, "synchronise the clocks with NTP; leases, lag in seconds and retention rest on them")


async def _skew(attachment: Attachment) -> tuple[bool, float | None]:
    """Whether a record came while we listened, and the newest stamp less our time."""
    before, deadline = await _newest(attachment), time.monotonic() + LISTEN_S
    newest = before
    while before is not None and time.monotonic() < deadline:
        await asyncio.sleep(LOOK_EVERY_S)
        newest = await _newest(attachment)
        if newest is not None and newest.offset != before.offset:
            return True, newest.timestamp - time.time()
    return False, None if newest is None else newest.timestamp - time.time()


async def _newest(attachment: Attachment) -> Record | None:
    history, topic = BusHistory(attachment.bus, CLIENT_ID), attachment.name_of(HEARTBEATS)
    found = await newest_records(history, topic, await history.extents(topic), 1)
    return found[0] if found else None


async def _stamped_by_broker(attachment: Attachment) -> bool:
    name = attachment.name_of(HEARTBEATS)
    facts = await ask_cluster(attachment.kafka, lambda topic: topic == name)
    return facts.topics[name].configs.get("message.timestamp.type") == "LogAppendTime" if facts.topics else False
