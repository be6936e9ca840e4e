"""Which lineages of an algorithm survive, and up to where: the newest and its ancestors by parent. Pure.

A lineage begins with a step report without groups that names its parent. Of an ancestor only what the checkpoint
holds counts from which its child went on: steps up to the parent's number, skip rows up to ``parent_skips``.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import NamedTuple

from schemas.identifiers import PolicyVersion


class Birth(NamedTuple):
    """The first report of a lineage: at which step it began, and from which version it went on."""

    lineage: int
    step: int
    parent: PolicyVersion | None
    parent_skips: int


class Link(NamedTuple):
    """The part of a lineage that counts: steps ``after < step <= until``, rows up to ``rows``.

    ``after`` None: its beginning is not known. ``until``, ``rows`` None: it is the newest, and all of it counts.
    """

    lineage: int
    after: int | None
    until: int | None
    rows: int | None

    def holds_step(self, number: int) -> bool:
        """Whether this step of the lineage counts; the beginning itself does."""
        return (self.after is None or self.after <= number) and (self.until is None or number <= self.until)


class BrokenLink(NamedTuple):
    """Why the chain cannot be followed, and at which lineage."""

    lineage: int
    problem: str


@dataclass(frozen=True)
class Chain:
    """Links from the oldest lineage to the newest."""

    links: tuple[Link, ...]
    broken: tuple[BrokenLink, ...]

    def link(self, lineage: int) -> Link | None:
        """The counted part of a lineage, if any."""
        return next((link for link in self.links if link.lineage == lineage), None)

    @property
    def newest(self) -> int:
        """Number of the newest lineage; 0 if there is none."""
        return self.links[-1].lineage if self.links else 0


def surviving_chain(births: Mapping[int, Birth], *, beginning_is_held: bool) -> Chain:
    """The chain of one algorithm.

    Args:
        births: first reports by lineage.
        beginning_is_held: whether the topic still holds its first report; if not, a birth may have expired.
    """
    links: list[Link] = []
    broken: list[BrokenLink] = []
    lineage, until, rows = max(births, default=0), None, None
    while lineage:
        birth = births.get(lineage)
        links.append(Link(lineage, birth.step if birth else None, until, rows))
        if birth is None:
            if beginning_is_held:
                broken.append(BrokenLink(lineage, f"lineage {lineage} went on to others and never announced itself"))
            break
        problem = _problem(birth, until)
        if problem:
            broken.append(BrokenLink(lineage, problem))
        if birth.parent is None or birth.parent.lineage >= lineage:
            break
        lineage, until, rows = birth.parent.lineage, birth.parent.number, birth.parent_skips
    return Chain(tuple(reversed(links)), tuple(broken))


def _problem(birth: Birth, until: int | None) -> str | None:
    number, step, parent = birth.lineage, birth.step, birth.parent
    if parent is None and step:
        return f"lineage {number} began at step {step} without a parent, expected step 0"
    if parent is not None and parent.lineage >= number:
        return f"lineage {number} names {parent} as its parent, which is not older"
    if parent is not None and parent.number != step:
        return f"lineage {number} began at step {step}, its parent is {parent}"
    if until is not None and until < step:
        return f"lineage {number} began at step {step}, a later one went on from its step {until}"
    return None
