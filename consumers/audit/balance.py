"""The verdict: produced = trained + skipped(reason) + pending, per algorithm, and whatever breaks it by name. Pure.

Every record on the trajectories topic must be trained by exactly one surviving step, skipped by exactly one surviving
row, or pending; and what the newest checkpoint takes for finished must be exactly what was trained or skipped before
it. Places below the first offset that the topic holds are compared with each other only.
"""

from collections import Counter
from collections.abc import Iterable, Sequence

import numpy as np

from consumers.audit.books.books import REASONS, TRAINED, AlgorithmBooks, Books
from consumers.audit.books.chain import surviving_chain
from consumers.audit.checks.checkpoints import Newest, check_checkpoint, newest_checkpoint
from consumers.audit.checks.lineages import check_lineages, counted_steps
from consumers.audit.checks.references import check_references
from consumers.audit.checks.sheet import EXPIRED_RANGE, PENDING, ProducedRecords, Sheet
from consumers.audit.checks.verdict import AlgorithmBalance, Offence, Undone, Verdict
from consumers.training.persistence.manifest import CheckpointManifest

_SEVERITY = tuple(Offence)


def balance(run: str, books: Books, manifests: Sequence[CheckpointManifest]) -> Verdict:
    """Judge a run. ``manifests``: its checkpoints as they were before the books were begun."""
    produced = ProducedRecords(books.produced, books.held)
    names = sorted({*books.algorithms, *(manifest.algorithm for manifest in manifests)})
    hashes = np.unique(produced.hashes[produced.hashes != 0])
    ordered = np.fromiter(books.ordered, dtype=np.uint64, count=len(books.ordered))
    return Verdict(
        run=run,
        produced=len(produced),
        distinct=len(hashes),
        undecodable=int(np.count_nonzero(produced.hashes == 0)),
        expired=sum(extent.first for extent in books.held.values()),
        orders=books.orders,
        ordered=len(ordered),
        ordered_unproduced=int(np.count_nonzero(~np.isin(ordered, hashes))),
        dead_letters=dict(sorted(books.dead_letters.items())),
        algorithms=tuple(_judge(name, books, produced, manifests) for name in names),
    )


def _judge(
    name: str, books: Books, produced: ProducedRecords, manifests: Iterable[CheckpointManifest]
) -> AlgorithmBalance:
    own = books.algorithms.get(name, AlgorithmBooks())
    chain = surviving_chain(own.births, beginning_is_held=books.steps_begin)
    sheet = Sheet(name, own, chain, produced)
    newest = newest_checkpoint(sheet, manifests)
    violations = [*check_references(sheet), *check_lineages(sheet), *newest.violations]
    forgotten = 0
    if newest.manifest is not None:
        found, forgotten = check_checkpoint(
            sheet, newest.manifest, rows_are_held=books.skips_begin, steps_are_held=books.steps_begin
        )
        violations = found + violations
    here = ~sheet.expired
    return AlgorithmBalance(
        algorithm=name,
        produced=len(produced),
        trained=int(np.count_nonzero(here & (sheet.codes == TRAINED))),
        skipped=_skipped(sheet),
        pending=int(np.count_nonzero(sheet.fates == PENDING)) - forgotten,
        expired_trained=int(np.count_nonzero(~here & (sheet.codes == TRAINED))),
        expired_skipped=int(np.count_nonzero(~here & (sheet.codes != TRAINED))),
        expired_fates=forgotten,
        steps=len(counted_steps(own, chain)),
        refused_steps=own.refused_steps,
        lineages=tuple(link.lineage for link in chain.links),
        checkpoint=str(newest.manifest.policy_version) if newest.manifest else None,
        undone=_undone(sheet),
        notes=tuple(_notes(books, newest, forgotten)),
        violations=tuple(sorted(violations, key=lambda violation: _SEVERITY.index(violation.offence))),
    )


def _skipped(sheet: Sheet) -> dict[str, int]:
    codes = sheet.codes[~sheet.expired & (sheet.codes != TRAINED)]
    counts = Counter({REASONS[code - 1].value: int(count) for code, count in zip(*_counted(codes), strict=True)})
    counts[REASONS[EXPIRED_RANGE - 1].value] += int(np.count_nonzero(sheet.fates == EXPIRED_RANGE))
    return dict(sorted((+counts).items()))


def _counted(codes: "np.ndarray[tuple[int], np.dtype[np.int64]]") -> tuple[list[int], list[int]]:
    values, counts = np.unique(codes, return_counts=True)
    return values.tolist(), counts.tolist()


def _undone(sheet: Sheet) -> Undone:
    trained = sheet.all_codes == TRAINED
    lost = ~sheet.counted
    surviving = {link.lineage for link in sheet.chain.links}
    counted = counted_steps(sheet.books, sheet.chain)
    return Undone(
        lineages=len(sheet.books.births.keys() - surviving),
        steps=len(sheet.books.steps) - sum(len(lineages) for lineages in counted.values()),
        trained=int(np.count_nonzero(lost & trained)),
        rows=int(np.count_nonzero(lost & ~trained & (sheet.all_lineages <= sheet.chain.newest))),
    )


def _notes(books: Books, newest: Newest, forgotten: int) -> Iterable[str]:
    if not books.steps_begin:
        yield "the steps topic has lost its beginning to retention: what was trained there is not known"
    if not books.skips_begin:
        yield "the skips topic has lost its beginning to retention: the checkpoint's rows could not be compared"
    if forgotten:
        yield f"{forgotten} finished records have a fate that the topics have forgotten"
    if newest.unannounced is not None:
        yield f"checkpoint {newest.unannounced.policy_version} has not been announced yet"
    if newest.manifest is None:
        yield "no announced checkpoint yet: nothing is compared with a frontier"
