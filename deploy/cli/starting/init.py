"""Files for a task of one's own."""

from pathlib import Path
from typing import Annotated, Literal

import typer


def add_to(app: typer.Typer) -> None:
    """Register the command."""
    app.command()(init)


def init(
    directory: Annotated[Path, typer.Argument(help="Where to put the files; made if need be.")] = Path("."),
    example: Annotated[
        Literal["math", "tiny"],
        typer.Option(help="math: a small instruct model of the hub; tiny: a model made here, for a trial on a CPU."),
    ] = "math",
) -> None:
    """Write a commented configuration, an example reward and example prompts; never over anything."""
    import shlex
    import shutil
    import sys

    from deploy.starting.examples import CONFIG
    from deploy.starting.writing import write_example

    for path in write_example(directory, example, print):
        print(f"wrote {path}")
    command = "streamrl" if shutil.which("streamrl") else shlex.quote(str(Path(sys.argv[0]).absolute()))
    print("next:")
    if directory.resolve() != Path.cwd():
        print(f"  cd {shlex.quote(str(directory))}")
    print(f"  {command} run --dry-run {CONFIG}   # checks everything, starts nothing")
    print(f"  {command} run {CONFIG}")
