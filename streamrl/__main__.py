"""The `streamrl` command, and `python -m streamrl`.

The command line takes some tenths of a second to load, and an interrupt in that time would print a traceback. So this
module imports almost nothing and handles signals first.
"""

import sys

from streamrl.schemas import stopping


def main() -> None:
    """Load the command line and run a command."""
    try:
        stopping.handle_signals()  # within the block, as a signal may come before this call returns
        from streamrl.cli.app import main as run_command

        run_command()
    except (KeyboardInterrupt, Exception) as error:
        from streamrl.schemas.errors import is_interrupted

        if not is_interrupted(error):
            raise
        stopping.report_stopped()
        sys.exit(stopping.exit_code())
    finally:
        stopping.is_over()


if __name__ == "__main__":
    main()
