"""Shows and explains the settings."""

from typing import Annotated

import typer

from deploy.cli.configuration.arguments import OVERRIDES, USAGE, split

config = typer.Typer(help="Show and explain the settings.", no_args_is_help=True)


@config.callback()
def _group() -> None:
    """Show and explain the settings."""


@config.command(context_settings=OVERRIDES, epilog=f"Arguments: {USAGE}")
def show(context: typer.Context, json: Annotated[bool, typer.Option("--json", help="As JSON.")] = False) -> None:
    """Print the resolved settings as TOML: defaults, file, environment and command line in one."""
    path, overrides = split(context.args)
    from deploy.settings.loading import as_toml, load_settings

    settings = load_settings(path, overrides)
    print(settings.model_dump_json(indent=2) if json else as_toml(settings), end="\n" if json else "")


@config.command()
def schema() -> None:
    """Print the JSON schema of the settings, for editors and for checks."""
    import json

    from deploy.settings.explaining import schema as whole

    print(json.dumps(whole(), indent=2))


@config.command(context_settings=OVERRIDES, epilog=f"Arguments: KEY {USAGE}")
def explain(
    context: typer.Context,
    key: Annotated[str, typer.Argument(help="Such as loop.max_staleness, or a section such as loop.")],
) -> None:
    """Say what a setting means, what it may be, where to set it, and with a file what it is there."""
    path, overrides = split(context.args)
    from deploy.settings.explaining import explain as lines
    from deploy.settings.loading import load_settings

    print("\n".join(lines(key, load_settings(path, overrides) if path or overrides else None)))
