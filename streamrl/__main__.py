"""The `streamrl` command, and `python -m streamrl`. Imports nothing by itself: Ctrl-C may come at any moment.

Loading the command line takes some tenths of a second, in which an interrupt would end in a traceback.
"""

import sys

INTERRUPTED = 130
"""128 + SIGINT, as a shell reports it."""


def main() -> None:
    """Load the command line and carry out a command."""
    try:
        from streamrl.cli.app import main as carry_out

        carry_out()
    except KeyboardInterrupt:
        sys.exit(INTERRUPTED)


if __name__ == "__main__":
    main()
