"""The command line of this process as Linux shows it to all users: in /proc/PID/cmdline, and so in ps."""

import contextlib
import ctypes
import sys
from collections.abc import Callable
from pathlib import Path


def change_shown_command_line(change: Callable[[bytes], bytes]) -> None:
    """Replace the shown line by ``change(line)``, whose arguments end with NUL. It is cut at the old line's length.

    Does nothing on other systems.
    """
    if sys.platform != "linux":
        return
    with contextlib.suppress(OSError, ValueError, IndexError):
        # arg_start and arg_end are fields 48 and 49 of proc(5). Field 2, a name in brackets, may contain spaces.
        fields = Path("/proc/self/stat").read_text().rpartition(")")[2].split()
        start, end = int(fields[45]), int(fields[46])
        room = end - start
        changed = change(ctypes.string_at(start, room))[:room]
        # Linux looks for more text after the line if its last byte is not NUL.
        ctypes.memmove(start, changed.ljust(room, b"\0")[: room - 1] + b"\0", room)
