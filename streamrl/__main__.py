"""The `streamrl` command, and `python -m streamrl`. Imports next to nothing by itself: a stop may come at any moment.

Loading the command line takes some tenths of a second, in which an interrupt would end in a traceback.
"""

import sys

from streamrl.schemas import stopping


def main() -> None:
    """Load the command line and carry out a command."""
    stopping.handle_signals()
    try:
        from streamrl.cli.app import main as carry_out

        carry_out()
    except (KeyboardInterrupt, Exception) as error:
        from streamrl.schemas.errors import is_interrupted

        if not is_interrupted(error):
            raise
        stopping.say_stopped()
        sys.exit(stopping.exit_code())
    finally:
        stopping.is_over()


if __name__ == "__main__":
    main()
