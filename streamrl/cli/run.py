"""Commands that start something: a task's files, a whole run, the demo, and each process alone."""

import sys
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Literal

import typer
from typer.core import TyperCommand

from streamrl.cli.arguments import OVERRIDES, USAGE, JoinedRun, role_settings, split
from streamrl.settings.features import FeatureRole, features
from streamrl.settings.first import FIRST, overview

if TYPE_CHECKING:
    from streamrl.settings.tree import Settings


def register(app: typer.Typer) -> None:
    """Add the commands, in the order in which help lists them."""
    app.command()(init)
    app.command(cls=RunCommand, context_settings=OVERRIDES, epilog=f"Arguments: {USAGE}")(run)
    app.command(context_settings=OVERRIDES, epilog="Arguments: [--section.key value]...")(demo)
    for role in (worker, trainer, coordinator, relay, dispatcher):
        _add_role(app, role)
    for feature in features():
        for added in feature.processes.roles:
            if added.help:
                _add_role(app, _command_of(added), added.name)
        feature.commands(app)
    app.add_typer(config, name="config")


WIDEST_KEY = 38
"""Columns of the longest key and its indentation in help."""


class RunCommand(TyperCommand):
    """`streamrl run`, whose help ends with the settings that people change."""

    def format_epilog(self, ctx: Any, formatter: Any) -> None:
        """Write the epilog, and the settings by what one wants."""
        super().format_epilog(ctx, formatter)
        for want, keys in FIRST.items():
            with formatter.section(want):
                formatter.write_dl([(f"--{key}", meaning) for key, meaning in keys.items()], col_max=WIDEST_KEY)
        formatter.write_paragraph()
        formatter.write_text("`streamrl config explain KEY` explains a setting; `streamrl config show` prints all.")


def _add_role(app: typer.Typer, command: Callable[..., None], name: str | None = None) -> None:
    app.command(name, context_settings=OVERRIDES, options_metavar="[OPTIONS]", epilog=f"Arguments: {USAGE}")(command)


def _command_of(role: FeatureRole) -> Callable[..., None]:
    """The command that starts a feature's role."""

    def start(context: typer.Context, run: JoinedRun = None) -> None:
        _run(role.name, context, run)

    def start_with_id(
        context: typer.Context,
        run: JoinedRun = None,
        own_id: Annotated[str, typer.Option("--id", help=f"Name of this {role.name}; default: a generated one.")] = "",
    ) -> None:
        _run(role.name, context, run, own_id)

    command: Callable[..., None] = start_with_id if role.has_id else start
    command.__doc__ = role.help
    return command


# The processes of a run, each started alone with a given broker.


def worker(
    context: typer.Context,
    run: JoinedRun = None,
    worker_id: Annotated[str, typer.Option("--id", help="Name of this worker; default: a generated one.")] = "",
) -> None:
    """A generation worker: work orders in, trajectories out."""
    _run("worker", context, run, worker_id)


Adopt = Annotated[
    bool,
    typer.Option(
        "--adopt",
        help="Take over a run whose topics exist but do not belong to this directory. It continues from the newest "
        "checkpoint here; without one it starts again and skips the trajectories sampled so far.",
    ),
]


def trainer(
    context: typer.Context,
    run: JoinedRun = None,
    standby: Annotated[
        bool,
        typer.Option("--standby", help="Load everything, and take over when the leading trainer goes silent."),
    ] = False,
    adopt: Adopt = False,
) -> None:
    """The trainer: trajectories in, weights out."""
    _run("standby" if standby else "trainer", context, run, adopt=adopt)


def coordinator(context: typer.Context, run: JoinedRun = None) -> None:
    """The coordinator: trained steps in, control messages out."""
    _run("coordinator", context, run)


def relay(context: typer.Context, run: JoinedRun = None) -> None:
    """A relay: passes weights to workers and other relays."""
    _run("relay", context, run)


def dispatcher(context: typer.Context, run: JoinedRun = None) -> None:
    """The dispatcher: prompts in, work orders out.

    It admits only prompts whose samples can be trained within the staleness bound.
    """
    _run("dispatcher", context, run)


def _run(role: str, context: typer.Context, run: Path | None, worker_id: str = "", *, adopt: bool = False) -> None:
    settings = role_settings(run, context.args)
    # Here and below, commands import inside functions, so that ``--help``, which loads this module, stays instant.
    from streamrl.settings.run_directory import RunDirectory

    # Only a complete run has this file; without it the slow import is not needed.
    if settings.run.name and RunDirectory(settings.run.path).summary.is_file():
        from streamrl.deploy.local.resuming import nothing_to_train

        if line := nothing_to_train(settings):
            print(line)
            return
    from streamrl.deploy.wiring.process import run_role

    code = run_role(role, settings, worker_id, adopt=adopt)
    if code and role in ("trainer", "standby"):
        from streamrl.deploy.local.resuming import resumed_step

        # If the trainer was stopped while it wrote its last checkpoint, the run is complete all the same.
        code = 0 if resumed_step(settings) >= settings.training.max_steps else code
    raise typer.Exit(code)


# Files for a new task.


def init(
    directory: Annotated[
        Path, typer.Argument(metavar="DIRECTORY", help="Directory for the files; created if missing.")
    ] = Path("."),
    example: Annotated[
        Literal["math", "tiny", "demo", "calculator", "smollm2"],
        typer.Option(
            help="math: a small instruct model from the hub; tiny: a model created here, for a trial on a CPU; demo: "
            "the task of `streamrl demo`; calculator: an environment of several turns, for tiny's model; smollm2: "
            "SmolLM2-135M-Instruct from a PyPI package, without the hub."
        ),
    ] = "math",
    if_missing: Annotated[
        bool, typer.Option("--if-missing", help="Write nothing if the directory has a streamrl.toml.")
    ] = False,
) -> None:
    """Write a commented configuration, prompts and a reward.

    Existing files are never overwritten.
    """
    import shlex
    import shutil

    from streamrl.init.examples import CONFIG, write_example

    written = write_example(directory, example, print, if_missing=if_missing)
    if not written:
        print(f"{directory / CONFIG} exists: nothing to write")
        return
    for path in written:
        print(f"wrote {path}")
    # The printed commands can be pasted: if ``streamrl`` is not on the PATH, they name the calling script.
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

    They combine defaults, file, environment and command line, as `streamrl run` would on this machine. Comments at the
    end list the devices and threads that each process would get.
    """
    path, overrides = split(context.args)
    from streamrl.inspection.environment import fitted_here
    from streamrl.schemas.errors import SettingsError
    from streamrl.settings.loading import as_toml, load_settings
    from streamrl.settings.placement import place

    settings = load_settings(path, overrides, to_look=True)
    try:
        settings, machine = fitted_here(settings)
        lines = place(settings, machine).lines()
    except SettingsError as error:  # the settings are still printed, because the user has to correct them
        lines = [f"not possible: {error}"]
    if json:
        print(settings.model_dump_json(indent=2))
        return
    from streamrl.inspection.prompt_tokens import completion_ends

    lines.append(f"a completion ends at: {completion_ends(settings)}")
    # The TOML already ends with a line break.
    print(as_toml(settings), end="")
    print("\n".join(["", "# On this machine:", *(f"#   {line}" for line in lines)]))


@config.command(context_settings=OVERRIDES, epilog=f"Arguments: [KEY] {USAGE}")
def explain(
    context: typer.Context,
    key: Annotated[
        str | None,
        typer.Argument(
            metavar="KEY",
            help="A setting such as loop.max_staleness, or a section such as loop; default: those that people change.",
        ),
    ] = None,
    as_schema: Annotated[bool, typer.Option("--schema", help="Print the JSON schema of all settings instead.")] = False,
) -> None:
    """Explain a setting: meaning, values, where to set it.

    With a configuration file, it also prints the setting's value in that file.
    """
    path, overrides = split(context.args)
    if as_schema:
        import json

        from streamrl.settings.explaining import schema

        print(json.dumps(schema(), indent=2))
        return
    if key is None:
        print("\n".join(overview()))
        return
    from streamrl.settings.explaining import explain as lines
    from streamrl.settings.loading import load_settings

    # Without a file and overrides there is no value to print, so no configuration is loaded.
    print("\n".join(lines(key, load_settings(path, overrides, to_look=True) if path or overrides else None)))


Top = Annotated[
    bool,
    typer.Option("--top/--no-top", help="On a terminal, show `streamrl top`; q closes it and the run continues."),
]


def run(
    context: typer.Context,
    top: Top = True,
    dry_run: Annotated[
        bool, typer.Option("--dry-run", help="Check everything and start nothing; exit code 2 if a check fails.")
    ] = False,
    prepare: Annotated[
        bool,
        typer.Option("--prepare", help="Check the task, reserve the run's name, create its topics; start nothing."),
    ] = False,
    adopt: Adopt = False,
) -> None:
    """Train: start everything that a run needs on this machine.

    It starts broker, coordinator, relay, dispatcher, workers and trainer. An existing run of the same name continues
    from its last checkpoint.
    """
    config, overrides = split(context.args)
    if dry_run:
        raise typer.Exit(_dry_run(config, overrides))
    raise typer.Exit(
        _run_locally(lambda: _load_settings(config, overrides), top=top, adopt=adopt, prepare_only=prepare)
    )


def _load_settings(config: Path | None, overrides: list[str]) -> "Settings":
    from streamrl.settings.loading import load_settings

    return load_settings(config, overrides)


def _run_locally(load: "Callable[[], Settings]", *, top: bool, adopt: bool = False, prepare_only: bool = False) -> int:
    """Train with the settings that ``load`` returns, after a first line that waits for no library."""
    from streamrl.deploy.local.long_steps import print_at_once, told_if_long

    print_at_once("loading settings and libraries")
    settings = load()
    with told_if_long("loading libraries"):
        from streamrl.deploy.local.run import run_locally
    return run_locally(settings, top=top, adopt=adopt, prepare_only=prepare_only)


def _dry_run(config: Path | None, overrides: list[str]) -> int:
    from streamrl.deploy.local.long_steps import told_if_long
    from streamrl.settings.loading import load_settings

    with told_if_long("loading libraries for the checks"):
        from streamrl.init.preflight import dry_run
    return dry_run(load_settings(config, overrides), print)


def demo(
    context: typer.Context,
    top: Top = False,
    engine: Annotated[Literal["transformers", "vllm"], typer.Option(help="Generation engine.")] = "transformers",
    seed: Annotated[int, typer.Option(min=0, help="Seed of the whole demo.")] = 0,
) -> None:
    """Train a tiny model on real Kafka, in minutes on a CPU.

    The model learns to work out sums step by step. There are two workers, or one with vLLM, and one trainer.
    """
    config, overrides = split(context.args)
    if config is not None:
        from streamrl.schemas.errors import UserError

        raise UserError(
            f"expected no file for the demo, which has its own settings, got {config}; to train with that file: "
            f"`streamrl run {config}`"
        )
    raise typer.Exit(_run_locally(lambda: _demo_settings(engine, seed, overrides), top=top))


def _demo_settings(engine: str, seed: int, overrides: list[str]) -> "Settings":
    from streamrl.demo.recipe import demo_settings

    return demo_settings(engine, seed, overrides, progress=print)
