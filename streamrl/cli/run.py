"""Commands that start something: a task's files, a whole run, the demo, and each process by itself."""

import sys
from collections.abc import Callable
from pathlib import Path
from typing import Annotated, Literal

import typer

from streamrl.cli.arguments import OVERRIDES, USAGE, split
from streamrl.settings.features import FeatureRole, features


def register(app: typer.Typer) -> None:
    """Add the commands, in the order in which help lists them."""
    app.command()(init)
    app.command(context_settings=OVERRIDES, epilog=f"Arguments: {USAGE}")(run)
    app.command(context_settings=OVERRIDES, epilog="Arguments: [--section.key value]...")(demo)
    for role in (worker, trainer, coordinator, relay, dispatcher):
        _add_role(app, role)
    for feature in features():
        for added in feature.processes.roles:
            if added.help:
                _add_role(app, _command_of(added), added.name)
        feature.commands(app)
    app.add_typer(config, name="config")


def _add_role(app: typer.Typer, command: Callable[..., None], name: str | None = None) -> None:
    app.command(name, context_settings=OVERRIDES, options_metavar="[OPTIONS]", epilog=f"Arguments: {USAGE}")(command)


def _command_of(role: FeatureRole) -> Callable[..., None]:
    """The command that starts a role of a feature."""

    def one(context: typer.Context) -> None:
        _run(role.name, context)

    def one_of_several(
        context: typer.Context,
        own_id: Annotated[str, typer.Option("--id", help=f"Name of this {role.name}; made up if left out.")] = "",
    ) -> None:
        _run(role.name, context, own_id)

    command: Callable[..., None] = one_of_several if role.has_id else one
    command.__doc__ = role.help
    return command


# The processes of a run, each started by hand against a named broker.


def worker(
    context: typer.Context,
    worker_id: Annotated[str, typer.Option("--id", help="Name of this worker; made up if left out.")] = "",
) -> None:
    """A generation worker: work orders in, trajectories out."""
    _run("worker", context, worker_id)


Adopt = Annotated[
    bool,
    typer.Option(
        "--adopt",
        help="Take over the run of this name that the topics hold and this directory does not: from the newest "
        "checkpoint here, or else anew, skipping what was sampled before.",
    ),
]


def trainer(
    context: typer.Context,
    standby: Annotated[
        bool, typer.Option("--standby", help="Load everything, and take over when the leading trainer falls silent.")
    ] = False,
    adopt: Adopt = False,
) -> None:
    """The trainer: trajectories in, weights out."""
    _run("standby" if standby else "trainer", context, adopt=adopt)


def coordinator(context: typer.Context) -> None:
    """The coordinator: trained steps in, control messages out."""
    _run("coordinator", context)


def relay(context: typer.Context) -> None:
    """A relay: serves the weights store over HTTP."""
    _run("relay", context)


def dispatcher(context: typer.Context) -> None:
    """The dispatcher: prompts in, work orders out.

    Admits no prompt that could not be trained within the staleness bound.
    """
    _run("dispatcher", context)


def _run(role: str, context: typer.Context, worker_id: str = "", *, adopt: bool = False) -> None:
    # Within the command, here and below: ``--help``, which loads this module, stays instant without such imports.
    config, overrides = split(context.args)
    from streamrl.settings.loading import load_settings
    from streamrl.settings.run_directory import RunDirectory

    settings = load_settings(config, overrides)
    # A look at one file, for what tells of a complete run takes long to import.
    if settings.run.name and RunDirectory(settings.run.path).summary.is_file():
        from streamrl.deploy.local.resuming import nothing_to_train

        if line := nothing_to_train(settings):
            print(line)
            return
    from streamrl.deploy.wiring.process import run_role

    code = run_role(role, settings, worker_id, adopt=adopt)
    if code and role in ("trainer", "standby"):
        from streamrl.deploy.local.resuming import resumed_step

        # Asked to end while it wrote its last checkpoint, it came to the run's end all the same.
        code = 0 if resumed_step(settings) >= settings.training.max_steps else code
    raise typer.Exit(code)


# Files for a task of one's own.


def init(
    directory: Annotated[Path, typer.Argument(help="Where to put the files; made if need be.")] = Path("."),
    example: Annotated[
        Literal["math", "tiny", "demo", "calculator", "smollm2"],
        typer.Option(
            help="math: a small instruct model of the hub; tiny: a model made here, for a trial on a CPU; demo: what "
            "`streamrl demo` trains; calculator: an environment of several turns, for tiny's model; smollm2: "
            "SmolLM2-135M-Instruct out of a PyPI package, without a hub."
        ),
    ] = "math",
    if_missing: Annotated[
        bool, typer.Option("--if-missing", help="Leave a directory that has a streamrl.toml as it is.")
    ] = False,
) -> None:
    """Write a commented configuration, prompts and a reward.

    Never over anything that is there.
    """
    import shlex
    import shutil

    from streamrl.init.examples import CONFIG, write_example

    written = write_example(directory, example, print, if_missing=if_missing)
    if not written:
        print(f"{directory / CONFIG} is there: nothing to write")
        return
    for path in written:
        print(f"wrote {path}")
    # To be pasted as it stands: where ``streamrl`` is not on the PATH, the script that was called is named instead.
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
    """Print the resolved settings as TOML.

    Defaults, file, environment and command line in one, as `streamrl run` would take them on this machine; comments at
    the end say which devices and threads each process would get.
    """
    path, overrides = split(context.args)
    from streamrl.inspection.environment import read_machine
    from streamrl.schemas.errors import SettingsError
    from streamrl.settings.loading import as_toml, load_settings
    from streamrl.settings.placement import for_machine, place

    settings, machine = load_settings(path, overrides, to_look=True), read_machine()
    try:
        settings = for_machine(settings, machine)
        lines = place(settings, machine).lines()
    except SettingsError as error:  # the settings are shown all the same: they are what is to be mended
        lines = [f"not possible: {error}"]
    if json:
        print(settings.model_dump_json(indent=2))
        return
    # The TOML ends with a line break of its own.
    print(as_toml(settings), end="")
    print("\n".join(["", "# On this machine:", *(f"#   {line}" for line in lines)]))


@config.command()
def schema() -> None:
    """Print the JSON schema of the settings."""
    import json

    from streamrl.settings.explaining import schema as whole

    print(json.dumps(whole(), indent=2))


@config.command(context_settings=OVERRIDES, epilog=f"Arguments: KEY {USAGE}")
def explain(
    context: typer.Context,
    key: Annotated[str, typer.Argument(help="Such as loop.max_staleness, or a section such as loop.")],
) -> None:
    """Say what a setting means, may be, and is.

    Where to set it, and with a file what it is there.
    """
    path, overrides = split(context.args)
    from streamrl.settings.explaining import explain as lines
    from streamrl.settings.loading import load_settings

    # Without either there is no configuration whose value could be told, so none is loaded.
    print("\n".join(lines(key, load_settings(path, overrides, to_look=True) if path or overrides else None)))


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
    prepare: Annotated[
        bool,
        typer.Option("--prepare", help="Check the task, take the run's name, make its topics; start nothing."),
    ] = False,
    adopt: Adopt = False,
) -> None:
    """Train: start everything that a run needs on this machine.

    Broker, coordinator, relay, dispatcher, workers and trainer; a run of that name goes on from its last checkpoint.
    """
    config, overrides = split(context.args)
    if dry_run:
        raise typer.Exit(_dry_run(config, overrides))
    from streamrl.deploy.local.run import run_locally
    from streamrl.settings.loading import load_settings

    code = run_locally(load_settings(config, overrides), top=top, adopt=adopt, prepare_only=prepare)
    raise typer.Exit(code)


def _dry_run(config: Path | None, overrides: list[str]) -> int:
    from streamrl.init.preflight import dry_run
    from streamrl.settings.loading import load_settings

    return dry_run(load_settings(config, overrides), print)


def demo(
    context: typer.Context,
    top: Top = False,
    engine: Annotated[Literal["transformers", "vllm"], typer.Option(help="Generation engine.")] = "transformers",
    seed: Annotated[int, typer.Option(min=0, help="Seed of the whole demo.")] = 0,
) -> None:
    """Train a tiny model on real Kafka, in minutes on a CPU.

    It finds out that working sums out pays, with two workers, of vLLM one, and one trainer.
    """
    config, overrides = split(context.args)
    if config is not None:
        from streamrl.schemas.errors import UserError

        raise UserError(
            f"expected no file for the demo, which has settings of its own, got {config}; to train what that says: "
            f"`streamrl run {config}`"
        )
    from streamrl.demo.recipe import demo_settings
    from streamrl.deploy.local.run import run_locally

    code = run_locally(demo_settings(engine, seed, overrides, progress=print), top=top)
    raise typer.Exit(code)
