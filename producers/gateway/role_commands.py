"""`streamrl gateway`: starts a gateway, and manages its API keys."""

from pathlib import Path
from typing import Annotated, Any

import typer
from typer.core import TyperGroup

from streamrl.cli.arguments import OVERRIDES, USAGE, GivenRun, JoinedRun, role_settings


class RoleGroup(TyperGroup):
    """A group that accepts a configuration instead of a command, as the commands of other roles do."""

    def parse_args(self, ctx: Any, args: list[str]) -> list[str]:
        """Arguments that do not start with a command are those of ``serve``."""
        if not args or not {args[0]} & {*self.commands, "-h", "--help"}:
            args = ["serve", *args]
        rest: list[str] = super().parse_args(ctx, args)
        return rest


gateway = typer.Typer(
    cls=RoleGroup,
    help="The gateway: an OpenAI-compatible API to a run's workers.\n\n`streamrl gateway --run RUN` starts it.",
    subcommand_metavar="[COMMAND] [ARGS]...",
)
keys = typer.Typer(help="Add, list and remove the API keys of a run's gateway.", no_args_is_help=True)
gateway.add_typer(keys, name="keys")


def register(app: typer.Typer) -> None:
    """Add the group."""
    app.add_typer(gateway, name="gateway")


@gateway.command(context_settings=OVERRIDES, options_metavar="[OPTIONS]", epilog=f"Arguments: {USAGE}")
def serve(context: typer.Context, run: JoinedRun = None) -> None:
    """Answer requests with a run's workers, until stopped.

    Completions that get feedback are trained on, if the requester consents.
    """
    settings = role_settings(run, context.args)
    # Imported here because ``--help`` also loads this module and should stay instant.
    from streamrl.deploy.wiring.process import run_role

    raise typer.Exit(run_role("gateway", settings, ""))


Limit = Annotated[int | None, typer.Option(min=1, help="No limit if not given.")]


@keys.command()
def add(
    name: Annotated[str, typer.Argument(metavar="NAME", help="Name of the key's holder.")],
    run: GivenRun,
    train: Annotated[
        bool,
        typer.Option("--train/--no-train", help="The holder consents to training on completions that get feedback."),
    ] = False,
    requests_per_minute: Limit = None,
    tokens_per_minute: Limit = None,
    concurrent: Limit = None,
) -> None:
    """Make a key and print it. It is not shown again.

    Only its hash is kept. A running gateway accepts the key at once.
    """
    secret = _file(run).make_key(
        name,
        train=train,
        requests_per_minute=requests_per_minute,
        tokens_per_minute=tokens_per_minute,
        concurrent=concurrent,
    )
    print(secret)


@keys.command("ls")
def list_(run: GivenRun) -> None:
    """Print the holders of keys, with their limits and consent."""
    for key in _file(run).read():
        limits: dict[str, Any] = key.model_dump(
            include={"requests_per_minute", "tokens_per_minute", "concurrent"}, exclude_none=True
        )
        limited = ", ".join(f"{value} {name.replace('_', ' ')}" for name, value in limits.items())
        print(f"{key.name}: {'trained on' if key.train else 'not trained on'}; {limited or 'no limits'}")


@keys.command()
def rm(name: Annotated[str, typer.Argument(metavar="NAME", help="Name of the key's holder.")], run: GivenRun) -> None:
    """Remove a key, which a running gateway refuses from then on."""
    _file(run).remove(name)
    print(f"removed: {name}")


def _file(run: Path) -> Any:
    from streamrl.inspection.source import describe_missing_run, directory_of
    from streamrl.producers.gateway.keys import KeyFile
    from streamrl.producers.gateway.settings import GatewaySettings
    from streamrl.schemas.errors import UserError
    from streamrl.settings.loading import load_settings
    from streamrl.settings.run_directory import RunDirectory

    found = directory_of(run)
    config = run if found is None else found.config
    if not config.is_file():
        raise UserError(f"expected a run or its configuration, got {describe_missing_run(run)}")
    # Works for a run that has not started, too, since keys may be made before.
    settings = load_settings(config, [], to_look=True)
    return KeyFile(settings.section(GatewaySettings).key_file(RunDirectory(settings.run.path).gateway))
