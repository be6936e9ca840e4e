"""Shows the settings."""

import typer

from deploy.cli.arguments import OVERRIDES, USAGE, split

config = typer.Typer(help="Show the settings.", no_args_is_help=True)


@config.callback()
def _group() -> None:
    """Show the settings."""


@config.command(context_settings=OVERRIDES, epilog=f"Arguments: {USAGE}")
def show(context: typer.Context) -> None:
    """Print the resolved settings as TOML: defaults, file, environment and command line in one."""
    path, overrides = split(context.args)
    from deploy.settings.loading import as_toml, load_settings

    print(as_toml(load_settings(path, overrides)), end="")
