"""Sessions that have their reward, in the feedback file: kept until their group is complete, then delivered.

A session that names no group is a group of its own. The sessions of a named group are delivered together when the group
has its full size. After the time-out they are delivered even if some are missing.
"""

import sqlite3
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import msgpack
import xxhash

from streamrl.producers.gateway.refusals import ApiError, invalid
from streamrl.producers.gateway.requests import SessionGroup
from streamrl.schemas.codec import decode, encode, headers_of
from streamrl.schemas.identifiers import make_group_id, make_trajectory_id
from streamrl.schemas.trajectories import Trajectory

_WAITING, _WHOLE, _DELIVERED = 0, 1, 2
SCHEMA = """
CREATE TABLE IF NOT EXISTS sessions (
    id TEXT PRIMARY KEY, key TEXT NOT NULL, name TEXT NOT NULL, ended_at REAL NOT NULL, state INTEGER NOT NULL,
    reward REAL NOT NULL, family TEXT NOT NULL, size INTEGER NOT NULL, body BLOB NOT NULL
);
CREATE INDEX IF NOT EXISTS session_by_state ON sessions (state, ended_at);
CREATE INDEX IF NOT EXISTS session_by_family ON sessions (key, family, state);
"""


class WholeGroup(NamedTuple):
    """Sessions that are delivered together: their ids and their trajectories."""

    ids: list[str]
    trajectories: list[Trajectory]


def packed(trajectories: Sequence[Trajectory]) -> bytes:
    """Trajectories as bytes, with this program's schema headers, so that a newer program can read them."""
    body: bytes = msgpack.packb([headers_of(Trajectory), [encode(one) for one in trajectories]])
    return body


def unpacked(body: bytes) -> list[Trajectory]:
    """Trajectories from the bytes that ``packed`` wrote."""
    headers, frames = msgpack.unpackb(body)
    messages = [decode(frame, tuple((name, value) for name, value in headers)) for frame in frames]
    return [one for one in messages if isinstance(one, Trajectory)]


@dataclass
class EndedSessions:
    """The table of ended sessions. The caller uses it from one thread at a time, within a transaction.

    ``lone_refusal``: see ``FeedbackStore``.
    """

    db: sqlite3.Connection
    clock: Callable[[], float]
    lone_refusal: str = ""

    def end(
        self, key: str, name: str, reward: float, group: SessionGroup | None, ended: tuple[str, Sequence[Trajectory]]
    ) -> dict[str, Any]:
        """Keep a session that has just ended; the answer to its feedback. ``ended``: its id and trajectories.

        Raises:
            ApiError: other sessions of its group named another group size.
        """
        session_id, trajectories = ended
        if self.db.execute("SELECT 1 FROM sessions WHERE id = ?", (session_id,)).fetchone() is not None:
            return self.again(key, name, reward)  # the same feedback came twice at the same time
        family, size = (session_id, 1) if group is None else (f"group/{group.id}", group.size)
        query = "SELECT count(*), max(size), min(size) FROM sessions WHERE key = ? AND family = ? AND state = ?"
        members, largest, smallest = self.db.execute(query, (key, family, _WAITING)).fetchone()
        if members and not largest == smallest == size:
            raise invalid("group", f"expected group size {largest}, as in the group's other sessions, got {size}")
        row = (session_id, key, name, self.clock(), _WAITING, reward, family, size, packed(trajectories))
        self.db.execute("INSERT INTO sessions VALUES (?, ?, ?, ?, ?, ?, ?, ?, ?)", row)
        if members + 1 >= size:
            change = "UPDATE sessions SET state = ? WHERE key = ? AND family = ? AND state = ?"
            self.db.execute(change, (_WHOLE, key, family, _WAITING))
        return _answer(name, reward, is_whole=members + 1 >= size)

    def again(self, key: str, name: str, reward: float) -> dict[str, Any]:
        """The answer to feedback for a session that is not open; fine if the session ended with the same reward.

        Raises:
            ApiError: it is unknown, or has another reward.
        """
        query = "SELECT reward, state FROM sessions WHERE key = ? AND name = ? ORDER BY ended_at DESC LIMIT 1"
        found = self.db.execute(query, (key, name)).fetchone()
        if found is None:
            raise ApiError(
                404,
                f"expected an open session of this key with calls that are trained on, got {name!r:.80}: it has no "
                "such calls, or was idle for too long, or the gateway has restarted",
                kind="not_found_error",
                param="session",
                code="session_not_found",
            )
        if found[0] != reward:
            raise ApiError(
                409, "expected the same reward as before, got another: the first one counts", param="session"
            )
        return _answer(name, reward, is_whole=found[1] != _WAITING)

    def sweep(self, old: float) -> int:
        """Complete the groups older than ``old`` with the sessions that they have, and forget delivered ones.

        Returns the number of sessions that were dropped because they are alone and nothing can be learnt from them.
        """
        change = "UPDATE sessions SET state = ? WHERE state = ? AND ended_at < ?"
        self.db.execute(change, (_WHOLE, _WAITING, old))
        self.db.execute("DELETE FROM sessions WHERE state = ? AND ended_at < ?", (_DELIVERED, old))
        if not self.lone_refusal:
            return 0
        alone = (
            "DELETE FROM sessions WHERE state = ? AND ended_at < ? AND size > 1 AND "
            "(SELECT count(*) FROM sessions AS other WHERE other.key = sessions.key AND "
            "other.family = sessions.family AND other.state = sessions.state) < 2"
        )
        return self.db.execute(alone, (_WHOLE, old)).rowcount

    def whole(self, most: int) -> list[WholeGroup]:
        """The next ``most`` groups to deliver, in the order in which their first sessions ended."""
        query = "SELECT key, family, min(ended_at) AS first FROM sessions WHERE state = ? GROUP BY key, family"
        families = self.db.execute(f"{query} ORDER BY first LIMIT ?", (_WHOLE, most)).fetchall()
        return [self._group(key, family, first) for key, family, first in families]

    def _group(self, key: str, family: str, first: float) -> WholeGroup:
        query = "SELECT id, body FROM sessions WHERE key = ? AND family = ? AND state = ? ORDER BY ended_at, id"
        rows = self.db.execute(query, (key, family, _WHOLE)).fetchall()
        members = [one for _, body in rows for one in unpacked(body)]
        # Every delivery of a group has the same name; a later group of the same family has another.
        name = xxhash.xxh3_128_hexdigest(f"{key}/{family}/{first}".encode())
        prompt_id = f"{members[0].dataset}/{name}"
        group_id, bucket = make_group_id(prompt_id, 0), max(one.bucket for one in members)
        numbered = [
            one.replace(
                trajectory_id=make_trajectory_id(group_id, index),
                group_id=group_id,
                prompt_id=prompt_id,
                sample_index=index,
                num_generations=len(members),
                bucket=bucket,
            )
            for index, one in enumerate(members)
        ]
        return WholeGroup([session_id for session_id, _ in rows], numbered)

    def delivered(self, ids: Sequence[str]) -> None:
        """Note that these sessions are on the topic."""
        rows = [(_DELIVERED, session_id) for session_id in ids]
        self.db.executemany("UPDATE sessions SET state = ?, body = x'' WHERE id = ?", rows)

    def waiting(self) -> int:
        """Number of sessions that are not delivered yet."""
        (count,) = self.db.execute("SELECT count(*) FROM sessions WHERE state != ?", (_DELIVERED,)).fetchone()
        return int(count)

    def drop_oldest(self, number: int) -> None:
        """Drop ``number`` sessions, those of incomplete groups first."""
        self.db.execute(
            "DELETE FROM sessions WHERE id IN (SELECT id FROM sessions WHERE state != ? ORDER BY state, ended_at "
            "LIMIT ?)",
            (_DELIVERED, number),
        )


def _answer(name: str, reward: float, *, is_whole: bool) -> dict[str, Any]:
    status = "complete" if is_whole else "open"
    return {"session": name, "object": "feedback", "status": status, "rewards": [reward]}
