"""The whole loop with one command, and the demo."""

from pathlib import Path
from typing import Annotated, Literal

import typer

from streamrl.cli.arguments import OVERRIDES, USAGE, split

# The processes of a run, each started by hand against a named broker.


def add_processes(app: typer.Typer) -> None:
    """Register the commands."""
    for command in (worker, trainer, coordinator, relay, dispatcher, ranker):
        app.command(context_settings=OVERRIDES, options_metavar="[OPTIONS]", epilog=f"Arguments: {USAGE}")(command)


def worker(
    context: typer.Context,
    worker_id: Annotated[str, typer.Option("--id", help="Name of this worker; made up if left out.")] = "",
) -> None:
    """A generation worker: takes work orders, publishes trajectories, adopts weights as they come."""
    _run("worker", context, worker_id)


def trainer(context: typer.Context) -> None:
    """The trainer: consumes trajectories, makes weights."""
    _run("trainer", context)


def coordinator(context: typer.Context) -> None:
    """The coordinator: turns trained steps into control messages."""
    _run("coordinator", context)


def relay(context: typer.Context) -> None:
    """A relay: serves the weights store over HTTP."""
    _run("relay", context)


def dispatcher(context: typer.Context) -> None:
    """The dispatcher: turns prompts into work orders, within the staleness bound."""
    _run("dispatcher", context)


def ranker(context: typer.Context) -> None:
    """The ranker: makes newer models of output length while the run goes on, for lengths.refit = "process"."""
    _run("ranker", context)


def _run(role: str, context: typer.Context, worker_id: str = "") -> None:
    config, overrides = split(context.args)
    from deploy.wiring.process import run_role
    from settings.loading import load_settings

    run_role(role, load_settings(config, overrides), worker_id)


# Files for a task of one's own.


def add_init(app: typer.Typer) -> None:
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

    from streamrl.init.examples import CONFIG, write_example

    for path in write_example(directory, example, print):
        print(f"wrote {path}")
    command = "streamrl" if shutil.which("streamrl") else shlex.quote(str(Path(sys.argv[0]).absolute()))
    print("next:")
    if directory.resolve() != Path.cwd():
        print(f"  cd {shlex.quote(str(directory))}")
    print(f"  {command} run --dry-run {CONFIG}   # checks everything, starts nothing")
    print(f"  {command} run {CONFIG}")


# Shows and explains the settings.

config = typer.Typer(help="Show and explain the settings.", no_args_is_help=True)


@config.callback()
def _group() -> None:
    """Show and explain the settings."""


@config.command(context_settings=OVERRIDES, epilog=f"Arguments: {USAGE}")
def show(context: typer.Context, json: Annotated[bool, typer.Option("--json", help="As JSON.")] = False) -> None:
    """Print the resolved settings as TOML: defaults, file, environment and command line in one."""
    path, overrides = split(context.args)
    from settings.loading import as_toml, load_settings

    settings = load_settings(path, overrides)
    print(settings.model_dump_json(indent=2) if json else as_toml(settings), end="\n" if json else "")


@config.command()
def schema() -> None:
    """Print the JSON schema of the settings, for editors and for checks."""
    import json

    from settings.explaining import schema as whole

    print(json.dumps(whole(), indent=2))


@config.command(context_settings=OVERRIDES, epilog=f"Arguments: KEY {USAGE}")
def explain(
    context: typer.Context,
    key: Annotated[str, typer.Argument(help="Such as loop.max_staleness, or a section such as loop.")],
) -> None:
    """Say what a setting means, what it may be, where to set it, and with a file what it is there."""
    path, overrides = split(context.args)
    from settings.explaining import explain as lines
    from settings.loading import load_settings

    print("\n".join(lines(key, load_settings(path, overrides) if path or overrides else None)))


def add_runs(app: typer.Typer) -> None:
    """Register the commands."""
    app.command(context_settings=OVERRIDES, epilog=f"Arguments: {USAGE}")(run)
    app.command(context_settings=OVERRIDES, epilog="Arguments: [--section.key value]...")(demo)


Top = Annotated[
    bool,
    typer.Option("--top/--no-top", help="On a terminal, show the view of `streamrl top`; q leaves it, not the run."),
]


def run(
    context: typer.Context,
    top: Top = True,
    dry_run: Annotated[
        bool, typer.Option("--dry-run", help="Check everything and start nothing; exit code 2 if a check fails.")
    ] = False,
) -> None:
    """Start broker, coordinator, relay, dispatcher, workers and trainer on this machine, and train."""
    config, overrides = split(context.args)
    if dry_run:
        raise typer.Exit(_dry_run(config, overrides))
    from deploy.local.run import run_locally
    from settings.loading import load_settings

    raise typer.Exit(run_locally(load_settings(config, overrides), top=top))


def _dry_run(config: Path | None, overrides: list[str]) -> int:
    from settings.loading import load_settings
    from streamrl.init.preflight import dry_run

    return dry_run(load_settings(config, overrides), print)


def demo(
    context: typer.Context,
    top: Top = False,
    engine: Annotated[Literal["transformers", "vllm"], typer.Option(help="Generation engine.")] = "transformers",
    seed: Annotated[int, typer.Option(min=0, help="Seed of the whole demo.")] = 0,
) -> None:
    """Train a tiny character model to spell words backward: real Kafka, two workers, one trainer, minutes on a CPU."""
    _config, overrides = split(context.args)
    from deploy.local.run import run_locally
    from streamrl.demo.recipe import demo_settings

    raise typer.Exit(run_locally(demo_settings(engine, seed, overrides, progress=print), top=top))
