"""What `streamrl status` and `streamrl lag` do: attach, read, print, and end with a code."""

import json

import uvloop

from deploy.inspection.bus_history import BusHistory
from deploy.surveys.attachment import CLIENT_ID, Attachment
from deploy.surveys.standing.lags import GroupLag, measure_lags
from deploy.surveys.standing.standing import Standing, last_metrics, read_standing, shards_of
from deploy.surveys.standing.view import lag_json, lag_lines, status_json, status_lines
from schemas.wire.topics import TRAJECTORIES


def show_status(attachment: Attachment, *, as_json: bool) -> int:
    """Print where the run stands; the exit code.

    Raises:
        UserError: no such run, or no broker.
    """
    standing = uvloop.run(_standing(attachment))
    print(json.dumps(status_json(standing)) if as_json else "\n".join(status_lines(standing)))
    return 0


async def _standing(attachment: Attachment) -> Standing:
    return await read_standing(await attachment.with_run())


def show_lag(attachment: Attachment, interval_s: float, *, as_json: bool) -> int:
    """Print the lag of every consumer group; the exit code.

    Raises:
        UserError: no such run, or no broker.
    """
    lags = uvloop.run(_lags(attachment, interval_s))
    if as_json:
        print(json.dumps([lag_json(lag) for lag in lags]))
    else:
        print("\n".join(line for lag in lags for line in lag_lines(lag)))
    return 0


async def _lags(attachment: Attachment, interval_s: float) -> list[GroupLag]:
    attached = await attachment.with_run()
    partitions = len(await BusHistory(attached.bus, CLIENT_ID).extents(attached.name_of(TRAJECTORIES)))
    metrics = {} if attached.settings is not None else await last_metrics(attached)
    return await measure_lags(attached, shards_of(attached, partitions, metrics), interval_s)
