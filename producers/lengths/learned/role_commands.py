"""`streamrl lengths`: fits rankers of output length to recorded trajectories."""

from pathlib import Path
from typing import Annotated

import typer

lengths = typer.Typer(help="Rankers of output length, from recorded trajectories.", no_args_is_help=True)


@lengths.callback()
def _group() -> None:
    """Rankers of output length, from recorded trajectories."""


@lengths.command()
def fit(
    places: Annotated[
        list[Path],
        typer.Argument(
            metavar="RUN...", help="A run's directory or name under runs/, or an export of one; any number."
        ),
    ],
    out: Annotated[Path, typer.Option(metavar="DIR", help="Where the next version goes: a run's lengths.model_dir.")],
    model: Annotated[
        Path | None,
        typer.Option(metavar="DIR", help="The language model to fine-tune, as from_pretrained reads it."),
    ] = None,
    light: Annotated[bool, typer.Option("--light", help="Fit trees instead of a language model.")] = False,
    quantile: Annotated[float, typer.Option(min=0.5, max=0.99, help="What the upper estimate shall cover.")] = 0.9,
    test_share: Annotated[float, typer.Option(min=0.0, max=0.9, help="Share of the prompts held out.")] = 0.2,
    epochs: Annotated[float, typer.Option(min=0.1, help="Passes over the prompts; of a language model.")] = 4.0,
) -> None:
    """Fit a ranker to recorded trajectories, and judge it.

    On prompts that were held out, against two baselines.
    """
    from streamrl.inspection.process import log_to_stderr
    from streamrl.schemas.errors import UserError

    if light == (model is not None):
        raise UserError("expected --light, or the language model to fine-tune with --model DIR; got both or neither")
    from streamrl.producers.lengths.learned.role_fitting import fit_lengths

    log_to_stderr()
    raise typer.Exit(fit_lengths(places, out, model, quantile, test_share, epochs))
