"""Reported work that no surviving lineage contains: undone by crashes, or by an operator's restore. Pure."""

from collections.abc import Collection, Mapping

import numpy as np

from streamrl.inspection.audit.columns import Ints, Mask
from streamrl.inspection.audit.index import CARRIED, TRAINED, counted_by
from streamrl.inspection.audit.report import UndoneWork
from streamrl.inspection.audit.table import AuditTable
from streamrl.schemas.lineage import LineageStart, surviving_chain


def undone_work(
    table: AuditTable, settled: Ints, counted: Mapping[int, Collection[int]]
) -> tuple[UndoneWork, UndoneWork]:
    """The work that crashes undid, and the work that an operator undid.

    ``settled``: undone entries of settled records, which are not in the table, see ``SettledFates``; ``counted``:
    surviving step numbers, with their lineages.
    """
    starts, chain, here = table.index.lineage_starts, table.chain, ~table.counted
    ones = np.ones(np.count_nonzero(here), dtype=np.int64)
    live = np.column_stack((table.all_codes[here], table.all_lineages[here], table.all_numbers[here], ones))
    codes, lineages, numbers, sizes = lost = np.concatenate((live, settled)).T
    # A lineage above the chain's newest has rows, but no report within the audited ends yet. That does not undo it.
    known = (lineages >= chain.begin) & ((codes == TRAINED) | (lineages <= chain.newest))
    codes, lineages, numbers, sizes = lost[:, known]
    trained, by_operator = codes == TRAINED, _by_operator(starts, codes, lineages, numbers)
    gone = [step for step in table.index.steps if step.lineage >= chain.begin]
    gone = [step for step in gone if step.lineage not in counted.get(step.number, ())]
    # An undone step counts as an operator's if its records do. A step without records does not.
    which = by_operator & trained
    versions = set(zip(lineages[which].tolist(), numbers[which].tolist(), strict=True))
    rolled_steps = sum(step in versions for step in gone)
    surviving = {link.lineage for link in chain.links}
    whole = [lineage for lineage in starts if lineage not in surviving and lineage >= chain.begin]
    rolled = [each for each in whole if any(start.lineage > each and start.undoes >= each for start in starts.values())]
    rows = ~trained & (codes != CARRIED)
    return (
        UndoneWork(
            lineages=len(whole) - len(rolled),
            steps=len(gone) - rolled_steps,
            trained=int(sizes[trained & ~by_operator].sum()),
            rows=int(sizes[rows & ~by_operator].sum()),
        ),
        UndoneWork(
            lineages=len(rolled),
            steps=rolled_steps,
            trained=int(sizes[trained & by_operator].sum()),
            rows=int(sizes[rows & by_operator].sum()),
        ),
    )


def _by_operator(starts: Mapping[int, LineageStart], codes: Ints, lineages: Ints, numbers: Ints) -> Mask:
    """Which entries were undone last by a lineage that an operator's restore started."""
    undone: Mask = np.zeros(len(codes), dtype=np.bool_)
    if not any(start.undoes for start in starts.values()):
        return undone
    is_lost = undone.copy()
    # Lineages in order: each one undoes the entries that its predecessor's chain contained and its own does not.
    for number in sorted(starts):
        chain = surviving_chain({n: start for n, start in starts.items() if n <= number}, beginning_is_held=False)
        kept, older = counted_by(chain, codes, lineages, numbers), lineages < number
        undone &= ~kept
        newly = older & ~kept & ~is_lost
        undone |= newly & (lineages <= starts[number].undoes)
        is_lost = (is_lost | newly) & ~kept
    return undone
