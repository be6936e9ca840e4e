"""What was reported and no surviving lineage contains: undone by crashes, or by an operator who went back. Pure."""

from collections.abc import Collection, Mapping

import numpy as np

from inspection.audit.index import CARRIED, TRAINED, Mask, as_ints, surviving_chain
from inspection.audit.report import UndoneWork
from inspection.audit.table import AuditTable


def undone_work(table: AuditTable, counted: Mapping[int, Collection[int]]) -> tuple[UndoneWork, UndoneWork]:
    """What crashes undid, and what an operator did. ``counted``: surviving step numbers, with their lineages."""
    starts, entries = table.index.lineage_starts, table.index.entries
    surviving = {link.lineage for link in table.chain.links}
    # Before the first lineage of the chain, if it came from another cluster, all that there is tells of that one.
    first = table.chain.links[0].lineage if table.chain.links else 0
    begin = first if first in starts and starts[first].carried_parts else 0
    trained = table.all_codes == TRAINED
    # A lineage above the newest of the chain has rows and no report within the ends yet; it is not undone by that.
    known = trained | (table.all_lineages <= table.chain.newest)
    lost = ~table.counted & known & (table.all_lineages >= begin)
    by_operator = lost & _undone_by_operator(table)
    gone = [v for v in table.index.steps if v.lineage >= begin and v.lineage not in counted.get(v.number, ())]
    # A step is undone by whoever undid its records; one without records is nobody's.
    names = set(
        zip(
            *(as_ints(column)[by_operator & trained].tolist() for column in (entries.lineages, entries.numbers)),
            strict=True,
        )
    )
    rolled_steps = sum(version in names for version in gone)
    whole = [lineage for lineage in starts if lineage not in surviving and lineage >= begin]
    rolled = [each for each in whole if any(start.lineage > each and start.undoes >= each for start in starts.values())]
    rows = lost & ~trained & (table.all_codes != CARRIED)
    return (
        UndoneWork(
            lineages=len(whole) - len(rolled),
            steps=len(gone) - rolled_steps,
            trained=int(np.count_nonzero(lost & trained & ~by_operator)),
            rows=int(np.count_nonzero(rows & ~by_operator)),
        ),
        UndoneWork(
            lineages=len(rolled),
            steps=rolled_steps,
            trained=int(np.count_nonzero(by_operator & trained)),
            rows=int(np.count_nonzero(rows & by_operator)),
        ),
    )


def _undone_by_operator(table: AuditTable) -> Mask:
    """Which entries were undone last by a lineage that went on from where an operator wanted it to."""
    starts = table.index.lineage_starts
    undone: Mask = np.zeros(len(table.index.entries), dtype=np.bool_)
    if not any(start.undoes for start in starts.values()):
        return undone
    is_lost = undone.copy()
    # From lineage to lineage as they came: what one leaves out that the one before had, it undoes.
    for number in sorted(starts):
        chain = surviving_chain({n: start for n, start in starts.items() if n <= number}, beginning_is_held=False)
        kept, older = table.counted_in(chain), table.all_lineages < number
        undone &= ~kept
        newly = older & ~kept & ~is_lost
        undone |= newly & (table.all_lineages <= starts[number].undoes)
        is_lost = (is_lost | newly) & ~kept
    return undone
