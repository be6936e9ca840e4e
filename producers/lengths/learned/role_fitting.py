"""Fits a length model to recorded completions, and scores it on held-out prompts.

The scores are saved next to the model.
"""

import json
import sys
from collections.abc import Sequence
from pathlib import Path

from rich.console import Console
from rich.table import Table
from rich.text import Text

from streamrl.inspection.lengths import recorded_completions
from streamrl.producers.lengths.learned.offline import TAILS, FitReport, fit_language_model, fit_trees
from streamrl.schemas.errors import UserError
from streamrl.schemas.plain_text import plain_text

REPORT = "report.json"
WIDTH = 110
"""Columns of the table if the output is not a terminal."""


def fit_lengths(
    places: Sequence[Path], out: Path, model: Path | None, quantile: float, test_share: float, epochs: float
) -> int:
    """Fit trees, or the language model if one is named; returns the exit code.

    Raises:
        UserError: there are no or too few completions, there is no such model, or the directory cannot be written.
    """
    completions = recorded_completions(places, _print_progress)
    _print_progress(f"{len(completions):,} completions read")
    try:
        if model is None:
            fitted = fit_trees(completions, out, quantile, test_share)
        else:
            from streamrl.producers.lengths.learned.language_model import FineTuning

            fitted = fit_language_model(completions, model, out, quantile, test_share, FineTuning(epochs=epochs))
        (out / REPORT).write_text(json.dumps(_as_json(fitted), indent=1) + "\n")
    except OSError as error:
        raise UserError(f"expected a writable directory for the model, got {out}: {error}") from error
    _print_scores(fitted, Console(width=None if sys.stdout.isatty() else WIDTH))
    print(f"version {fitted.version} in {out}: fitted to {fitted.train:,} completions, scored on {fitted.test:,}")
    return 0


def _as_json(fitted: FitReport) -> dict[str, object]:
    scores = {
        predictor: {dataset: one.fields() for dataset, one in by_dataset.items()}
        for predictor, by_dataset in fitted.scores.items()
    }
    return {"version": fitted.version, "taught": fitted.train, "asked": fitted.test, "held_out": scores}


def _print_scores(fitted: FitReport, console: Console) -> None:
    """Print a table: over all data sets for every predictor, then by data set for the ranker, the last predictor."""
    table = Table(title="held-out prompts: recall of the longest, order, share below the upper estimate")
    for name in ("data set", "predictor"):
        table.add_column(name)
    for name in ("completions", *(f"recall @{share:.0%}" for share in TAILS), "Kendall tau", "coverage"):
        table.add_column(name, justify="right")
    predictors = list(fitted.scores)
    rows = [("all", predictor) for predictor in predictors]
    rows += [(dataset, predictors[-1]) for dataset in fitted.scores[predictors[-1]] if dataset != "all"]
    for dataset, predictor in rows:
        found = fitted.scores[predictor].get(dataset)
        if found is not None:
            numbers = (*found.recall, found.tau, found.coverage)
            table.add_row(Text(plain_text(dataset)), predictor, f"{found.completions:,}", *map(_number, numbers))
    console.print(table)


def _number(value: float | None) -> str:
    return "" if value is None else f"{value:.3f}"


def _print_progress(line: str) -> None:
    print(line, file=sys.stderr)
