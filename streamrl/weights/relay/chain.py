"""Decides which relay fetches weights from which: the living relays form a chain that each works out alone. Pure.

    store ── a1 ── a2 ── a3 │ b1 ── b2 │ c1        one relay per host, sites a, b and c

Each relay fetches from the one before it, chunk by chunk, while that one is still receiving. So the last relay has a
version a moment after the first, and every link carries it once. The chain goes site by site, so that it crosses a slow
link between two sites once. Hosts of the store's own site fetch near the store, wherever their site is in the chain.
This is Laminar's chain-pipelined broadcast (arXiv 2510.12633, section 4 and appendix D), pulled instead of pushed.

Invariants:
- relays_never_wait_for_each_other: a relay fetches only from relays before it, in an order given by each relay's own
  name and site, or from relays that hold the whole version. So two relays never wait for each other, even if
  they disagree on which relays exist;
- every_relay_has_an_upstream: as long as a store, or a relay that holds the version, is alive and not given up.
"""

from collections.abc import Collection, Iterable
from dataclasses import dataclass

from streamrl.schemas.identifiers import PolicyVersion
from streamrl.schemas.liveness import LastBeats
from streamrl.schemas.messages import is_compatible_wire_version
from streamrl.schemas.reports import RelayBeat


@dataclass(frozen=True)
class RelayMember:
    """A relay as the others know it.

    ``held``: the whole versions that it has of the run's own series; ``of_series``: those of other series. A store
    counts as having every version.
    """

    relay_id: str
    address: str
    host: str = ""
    site: str = ""
    has_store: bool = False
    held: frozenset[PolicyVersion] = frozenset()
    of_series: frozenset[tuple[str, PolicyVersion]] = frozenset()

    def holds(self, version: PolicyVersion, series: str = "") -> bool:
        """Whether the relay has the whole version of a series, so that it waits for no other relay to serve it."""
        return self.has_store or ((series, version) in self.of_series if series else version in self.held)


def chain_of(members: Iterable[RelayMember]) -> list[RelayMember]:
    """The relays in the chain's order: stores first, then site by site, each sorted by name."""
    return sorted(members, key=lambda member: (not member.has_store, member.site, member.relay_id))


def upstreams(
    relay_id: str,
    members: Iterable[RelayMember],
    version: PolicyVersion,
    given_up: Collection[str] = (),
    series: str = "",
) -> list[RelayMember]:
    """The relays from which a relay may fetch a version, the best first: near sites first, then earlier in the chain.

    A late relay fetches from a later neighbour that holds the version, to spare a slow link a second transfer.
    ``series``: the version's series.
    """
    chain = [member for member in chain_of(members) if member.relay_id == relay_id or member.relay_id not in given_up]
    place = next(number for number, member in enumerate(chain) if member.relay_id == relay_id)
    me = chain[place]
    before = chain[place - 1 :: -1] if place else []
    holders = [member for member in chain[place + 1 :] if member.holds(version, series)]
    near = [[member for member in some if member.site == me.site] for some in (before, holders)]
    far = [[member for member in some if member.site != me.site] for some in (before, holders)]
    return [*near[0], *near[1], *far[0], *far[1]]


class RelayMembership(LastBeats[RelayBeat]):
    """The last heartbeat of each relay, by id; see ``schemas/liveness.py``."""

    def living(self, now: float) -> list[RelayMember]:
        """The living relays, in the chain's order."""
        return chain_of(
            member_of(beat)
            for name, beat in self
            if not self.is_silent(name, now) and not beat.leaving and is_compatible_wire_version(beat.wire)
        )


def member_of(beat: RelayBeat) -> RelayMember:
    """The relay that a heartbeat describes."""
    return RelayMember(
        beat.relay_id,
        beat.address,
        beat.host,
        beat.site,
        beat.has_store,
        frozenset(beat.held),
        of_series=frozenset((series, version) for series, held in beat.held_of_arms.items() for version in held),
    )
