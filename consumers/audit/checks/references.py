"""Whether each record met one fate, and is the one that was meant. Pure.

Invariants, each with a test of its name: nothing_is_trained_twice, no_record_has_two_fates, every_reference_is_right.
"""

import numpy as np

from consumers.audit.books.books import TRAINED
from consumers.audit.books.columns import Mask
from consumers.audit.checks.sheet import Sheet
from consumers.audit.checks.verdict import Offence, Violation


def check_references(sheet: Sheet) -> list[Violation]:
    """All offences of single records."""
    return [
        *_second_fates(sheet),
        *_same_name_trained_twice(sheet),
        *_unknown_records(sheet),
        *_wrong_records(sheet),
    ]


def _second_fates(sheet: Sheet) -> list[Violation]:
    """Places that more than one counted entry names, by what the entries say."""
    order = np.argsort(sheet.keys, kind="stable")
    keys, trained = sheet.keys[order], sheet.codes[order] == TRAINED
    begins = np.flatnonzero(np.concatenate(([True], keys[1:] != keys[:-1]))) if len(keys) else np.zeros(0, np.int64)
    sizes = np.diff(np.append(begins, len(keys)))
    trained_in = np.add.reduceat(trained.astype(np.int64), begins) if len(begins) else sizes
    found: list[Violation] = []
    for offence, groups in (
        (Offence.TRAINED_TWICE, trained_in > 1),
        (Offence.TWO_FATES, (trained_in > 0) & (trained_in < sizes)),
        (Offence.SKIPPED_TWICE, sizes - trained_in > 1),
    ):
        offending = np.flatnonzero(groups)
        if len(offending):
            begin, size = int(begins[offending[0]]), int(sizes[offending[0]])
            which = np.zeros(len(keys), dtype=np.bool_)
            which[order[begins[offending]]] = True
            sources = " and ".join(sheet.source(int(position)) for position in order[begin : begin + size][:4])
            found += sheet.violation(offence, which, f"by {sources}")
    return found


def _same_name_trained_twice(sheet: Sheet) -> list[Violation]:
    """One trajectory in two records, both trained; the same record twice was found already."""
    hashes = sheet.books.entries.names.hashes()[sheet.chosen]
    positions = np.flatnonzero((sheet.codes == TRAINED) & (hashes != 0))
    _, first = np.unique(sheet.keys[positions], return_index=True)
    positions = positions[first]
    order = np.argsort(hashes[positions], kind="stable")
    sorted_hashes = hashes[positions][order]
    again = np.flatnonzero(sorted_hashes[1:] == sorted_hashes[:-1])
    if not len(again):
        return []
    which = np.zeros(len(hashes), dtype=np.bool_)
    which[positions[order[again]]] = True
    one, other = (int(positions[order[index]]) for index in (again[0], again[0] + 1))
    detail = f"two records of it, by {sheet.source(one)} and {sheet.source(other)}"
    return sheet.violation(Offence.TRAINED_TWICE, which, detail)


def _unknown_records(sheet: Sheet) -> list[Violation]:
    return sheet.violation(Offence.UNKNOWN_RECORD, (sheet.at < 0) & ~sheet.expired)


def _wrong_records(sheet: Sheet) -> list[Violation]:
    """A name of None fits any record: it was not decoded."""
    known = sheet.at >= 0
    reported = sheet.books.entries.names.hashes()[sheet.chosen]
    differs: Mask = np.zeros(len(sheet.at), dtype=np.bool_)
    differs[known] = sheet.produced.hashes[sheet.at[known]] != reported[known]
    wrong = differs & ((reported != 0) | (sheet.codes == TRAINED))
    if not np.any(wrong):
        return []
    first = np.flatnonzero(wrong)
    position = int(first[np.argmin(sheet.keys[first])])
    holds = sheet.produced.name(int(sheet.at[position])) or "undecodable bytes"
    return sheet.violation(Offence.WRONG_RECORD, wrong, f"by {sheet.source(position)}, the record holds {holds}")
