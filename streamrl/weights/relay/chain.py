"""Who fetches weights from whom: a chain of the living relays, worked out by each of them alone. Pure.

    store ── a1 ── a2 ── a3 │ b1 ── b2 │ c1        one relay a host, sites a, b and c

Each fetches from the one before it, chunk by chunk and before that one has the whole, so that the last has a version a
moment after the first, and every link carries it once. The sites follow one another: a slow link between two of
them is crossed once; hosts around the store fetch there, wherever their site comes. This is Laminar's chain-pipelined
broadcast (arXiv 2510.12633, section 4 and appendix D), pulled instead of pushed.

Invariants:
- nobody_waits_for_itself: who does not hold a version whole fetches from those before it in an order that each relay's
  own name and site decide, or from who holds it whole; so whatever two relays believe of the others, they never wait
  for each other;
- every_relay_has_an_upstream: as long as one that holds the version, or a store, is there and not given up.
"""

from collections.abc import Collection, Iterable
from dataclasses import dataclass

from streamrl.schemas.identifiers import PolicyVersion
from streamrl.schemas.liveness import LastBeats
from streamrl.schemas.messages import is_near_version
from streamrl.schemas.reports import RelayBeat


@dataclass(frozen=True)
class RelayMember:
    """A relay as the others know it; ``held``: the versions of the run's own series that it has whole;
    ``of_series``: those of others. A store is taken to have every one.
    """

    relay_id: str
    address: str
    host: str = ""
    site: str = ""
    has_store: bool = False
    held: frozenset[PolicyVersion] = frozenset()
    of_series: frozenset[tuple[str, PolicyVersion]] = frozenset()

    def holds(self, version: PolicyVersion, series: str = "") -> bool:
        """Whether it waits for nobody to serve that version of a series."""
        return self.has_store or ((series, version) in self.of_series if series else version in self.held)


def chain_of(members: Iterable[RelayMember]) -> list[RelayMember]:
    """The stores, then site after site, by name."""
    return sorted(members, key=lambda member: (not member.has_store, member.site, member.relay_id))


def upstreams(
    relay_id: str,
    members: Iterable[RelayMember],
    version: PolicyVersion,
    given_up: Collection[str] = (),
    series: str = "",
) -> list[RelayMember]:
    """From whom that relay may fetch a version, the best first: near before far, in the chain before beside it.

    A relay that comes late takes what a neighbour holds, rather than have a slow link carry it once more. ``series``:
    the one that it is of.
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
    """Relays by id; see ``schemas/liveness.py``."""

    def living(self, now: float) -> list[RelayMember]:
        """Those that are there, as a chain."""
        return chain_of(
            member_of(beat)
            for name, beat in self
            if not self.is_silent(name, now) and not beat.leaving and is_near_version(beat.wire)
        )


def member_of(beat: RelayBeat) -> RelayMember:
    """What a beat says."""
    return RelayMember(
        beat.relay_id,
        beat.address,
        beat.host,
        beat.site,
        beat.has_store,
        frozenset(beat.held),
        of_series=frozenset((series, version) for series, held in beat.held_of_arms.items() for version in held),
    )
