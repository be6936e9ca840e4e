"""An audit's verdict as lines and tables for people."""

from collections.abc import Iterable

from rich.console import Console
from rich.table import Table

from consumers.audit.checks.verdict import AlgorithmBalance, Verdict

MEASURES = ("produced", "trained", "skipped", "pending")
WIDTH = 100


def show_verdict(verdict: Verdict, console: Console) -> None:
    """Print the verdict. Its first line says whether the books balance, and if not, what breaks them first."""
    console.print(headline(verdict), soft_wrap=True, markup=False, highlight=False)
    for violation in verdict.violations[1:]:
        console.print(str(violation), soft_wrap=True, markup=False, highlight=False)
    console.print(_table(verdict))
    for line in _facts(verdict):
        console.print(line, soft_wrap=True, markup=False, highlight=False)


def headline(verdict: Verdict) -> str:
    """One line."""
    if verdict.violations:
        return f"NOT BALANCED: {verdict.violations[0]}"
    if not verdict.is_balanced:
        return "NOT BALANCED: the figures do not add up, though no record was found to be wrong"
    return f"balanced: run {verdict.run}, {verdict.produced} records, every one with exactly one fate"


def _table(verdict: Verdict) -> Table:
    table = Table(box=None, pad_edge=False)
    table.add_column("")
    columns = verdict.algorithms
    for own in columns:
        table.add_column(own.algorithm, justify="right")
    table.add_column("total", justify="right")

    def row(name: str, figures: Iterable[int], *, indent: bool = False) -> None:
        numbers = list(figures)
        shown = [f"{number:,}" for number in (*numbers, sum(numbers))]
        table.add_row(f"  {name}" if indent else name, *shown)

    if not columns:
        table.add_row("produced", f"{verdict.produced:,}")
        table.add_row("= pending", f"{verdict.produced:,}")
        return table
    row("produced", (own.produced for own in columns))
    row("= trained", (own.trained for own in columns))
    row("+ skipped", (own.skipped_in_all for own in columns))
    for reason in sorted({reason for own in columns for reason in own.skipped}):
        row(reason, (own.skipped.get(reason, 0) for own in columns), indent=True)
    row("+ pending", (own.pending for own in columns))
    if any(own.expired_fates for own in columns):
        row("+ forgotten by the topics", (own.expired_fates for own in columns))
    return table


def _facts(verdict: Verdict) -> Iterable[str]:
    for own in verdict.algorithms:
        yield from _facts_of(own)
    copies = verdict.produced - verdict.undecodable - verdict.distinct
    yield f"records: {verdict.distinct:,} trajectories, {copies:,} copies, {verdict.undecodable:,} undecodable"
    if verdict.orders:
        missing = verdict.ordered_unproduced
        yield f"ordered: {verdict.ordered:,} trajectories in {verdict.orders:,} orders, {missing:,} not produced"
    if verdict.dead_letters:
        reasons = ", ".join(f"{name} {count:,}" for name, count in verdict.dead_letters.items())
        yield f"dead letters: {reasons}"
    if verdict.expired:
        yield f"retention has deleted {verdict.expired:,} offsets at the start of the log"
    yield f"audited in {verdict.seconds:.1f} s"


def _facts_of(own: AlgorithmBalance) -> Iterable[str]:
    chain = " → ".join(map(str, own.lineages)) or "none"
    compared = own.checkpoint or "none"
    yield f"{own.algorithm}: {own.steps:,} steps, lineages {chain}, compared with checkpoint {compared}"
    undone = own.undone
    if undone.steps or undone.lineages or undone.rows:
        yield (
            f"{own.algorithm}: undone by crashes: {undone.steps} steps with {undone.trained} trajectories, "
            f"{undone.rows} skip rows, {undone.lineages} whole lineages"
        )
    if own.refused_steps:
        yield f"{own.algorithm}: {own.refused_steps} refused steps"
    if own.expired_trained or own.expired_skipped:
        yield (
            f"{own.algorithm}: of records that retention has deleted since: {own.expired_trained} trained, "
            f"{own.expired_skipped} skipped"
        )
    for note in own.notes:
        yield f"{own.algorithm}: {note}"
