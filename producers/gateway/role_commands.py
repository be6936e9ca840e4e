"""`streamrl gateway`: serving, and the API keys of those who may ask."""

from pathlib import Path
from typing import Annotated, Any

import typer
from typer.core import TyperGroup

from streamrl.cli.arguments import OVERRIDES, USAGE, split


class RoleGroup(TyperGroup):
    """Takes a configuration in place of a command, as the other roles do."""

    def parse_args(self, ctx: Any, args: list[str]) -> list[str]:
        """What names no command is for ``serve``."""
        if not args or not {args[0]} & {*self.commands, "-h", "--help"}:
            args = ["serve", *args]
        rest: list[str] = super().parse_args(ctx, args)
        return rest


gateway = typer.Typer(
    cls=RoleGroup,
    help="The gateway: OpenAI's interface to a run's workers.\n\n`streamrl gateway CONFIG.TOML` serves.",
    subcommand_metavar="[COMMAND] [ARGS]...",
)
keys = typer.Typer(help="Make, list and remove the API keys of a run's gateway.", no_args_is_help=True)
gateway.add_typer(keys, name="keys")


def register(app: typer.Typer) -> None:
    """Add the group."""
    app.add_typer(gateway, name="gateway")


@gateway.command(context_settings=OVERRIDES, options_metavar="[OPTIONS]", epilog=f"Arguments: {USAGE}")
def serve(context: typer.Context) -> None:
    """Answer requesters from a run's workers, until stopped.

    Feedback to what is sampled for them is trained on, if they agree.
    """
    config, overrides = split(context.args)
    # Within the command: ``--help``, which loads this module, stays instant without such imports.
    from streamrl.deploy.wiring.process import run_role
    from streamrl.settings.loading import load_settings

    raise typer.Exit(run_role("gateway", load_settings(config, overrides), ""))


RunPath = Annotated[
    Path, typer.Option("--run", help="The run's directory, its name under runs/, or its configuration file.")
]
Limit = Annotated[int | None, typer.Option(min=1, help="No limit if left out.")]


@keys.command()
def add(
    name: Annotated[str, typer.Argument(help="Whose it is.")],
    run: RunPath,
    train: Annotated[
        bool,
        typer.Option("--train/--no-train", help="Its holder agrees to be trained on, as far as feedback goes."),
    ] = False,
    requests_per_minute: Limit = None,
    tokens_per_minute: Limit = None,
    concurrent: Limit = None,
) -> None:
    """Make a key and print it, once.

    Only its hash is kept; a running gateway takes it at once.
    """
    secret = _file(run).make_key(
        name,
        train=train,
        requests_per_minute=requests_per_minute,
        tokens_per_minute=tokens_per_minute,
        concurrent=concurrent,
    )
    print(secret)


@keys.command("list")
def list_(run: RunPath) -> None:
    """Print whose keys there are, their limits and consent."""
    for key in _file(run).read():
        limits: dict[str, Any] = key.model_dump(
            include={"requests_per_minute", "tokens_per_minute", "concurrent"}, exclude_none=True
        )
        limited = ", ".join(f"{value} {name.replace('_', ' ')}" for name, value in limits.items())
        print(f"{key.name}: {'trained on' if key.train else 'not trained on'}; {limited or 'no limits'}")


@keys.command()
def remove(name: Annotated[str, typer.Argument(help="Whose it is.")], run: RunPath) -> None:
    """Let nobody in with a key any more."""
    _file(run).remove(name)
    print(f"removed: {name}")


def _file(run: Path) -> Any:
    from streamrl.inspection.source import directory_of, no_run
    from streamrl.producers.gateway.keys import KeyFile
    from streamrl.producers.gateway.settings import GatewaySettings
    from streamrl.schemas.errors import UserError
    from streamrl.settings.loading import load_settings
    from streamrl.settings.run_directory import RunDirectory

    found = directory_of(run)
    config = run if found is None else found.config
    if not config.is_file():
        raise UserError(f"expected a run or its configuration, got {no_run(run)}")
    # Also of a run that has not begun: keys are made before anybody asks.
    settings = load_settings(config, [], to_look=True)
    return KeyFile(settings.section(GatewaySettings).key_file(RunDirectory(settings.run.path).gateway))
