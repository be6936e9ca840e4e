# -*- coding: utf-8 -*-
"""``python3 .ci/can_set_up.py [--vllm] [DIRECTORY]``: can `make setup` use this Python? Exit code 0, or 2 and one line.

Runs by itself on any Python, so that an old one can say that it is too old: no f-strings, no annotations, no packages.

``--vllm``: can it also have vLLM's CPU build? DIRECTORY: where the environment comes; without it, room on the disk is
not looked at.
"""

import os
import platform
import shutil
import sys

OLDEST, NEWEST = (3, 11), (3, 14)
"""What torch of requirements.txt has wheels for; `make check-pythons` installs both ends."""
GLIBC, GLIBC_OF_VLLM = (2, 28), (2, 31)
"""What the wheels of torch are built for, and those of llguidance, which vLLM needs."""
MACHINES = ("x86_64", "aarch64")
GIGABYTES = {".venv": 7.0, ".venv-vllm": 3.0}
"""What an environment takes: all of .venv, and what vLLM adds. On one disk it shares its files with uv's cache."""
RANGE = "Python {0}.{1} to {2}.{3}".format(*(OLDEST + NEWEST))


def problem(directory=None, vllm=False):
    """What is missing, as "expected …, got …; do …", or None."""
    return _interpreter() or _system(vllm) or _modules() or (directory and _room(directory, vllm)) or None


def _interpreter():
    here = "{0} {1} at {2}".format(platform.python_implementation(), platform.python_version(), sys.executable)
    choose = "install one of them, or choose one that is there: make setup PYTHON=/path/to/python3"
    if platform.python_implementation() != "CPython" or sys.version_info < OLDEST:
        return "expected C{0}, got {1}; {2}".format(RANGE, here, choose)
    if sys.version_info[:2] > NEWEST:
        return "expected C{0} (PyTorch has no wheels for a newer one), got {1}; {2}".format(RANGE, here, choose)
    if getattr(sys, "_is_gil_enabled", None) and _config("Py_GIL_DISABLED"):
        return "expected C{0} with its global lock, got the free-threaded {1}; {2}".format(RANGE, here, choose)
    return None


def _config(name):
    import sysconfig

    return sysconfig.get_config_var(name)


def _system(vllm):
    machine, glibc = platform.machine(), libc()
    if sys.platform != "linux" or machine not in MACHINES or sys.maxsize < 2**32:
        bits = 64 if sys.maxsize > 2**32 else 32
        return "expected 64-bit Linux on {0}, got {1}-bit {2} on {3}; use such a machine, or a container of one".format(
            " or ".join(MACHINES), bits, platform.system(), machine
        )
    oldest, of = (GLIBC_OF_VLLM, "vLLM") if vllm else (GLIBC, "PyTorch")
    if glibc is None or glibc < oldest:
        got = "another C library (musl?)" if glibc is None else "glibc {0}.{1}".format(*glibc)
        return (
            "expected glibc {0}.{1} or newer, which the wheels of {2} are built for, got {3}; "
            "use a newer Linux, or a container of one such as python:3.11-slim".format(oldest[0], oldest[1], of, got)
        )
    if vllm and machine != "x86_64":
        return "expected x86_64, which vLLM's CPU build has wheels for, got {0}; use ENGINE=transformers".format(
            machine
        )
    return None


def libc():
    """Version of glibc as two numbers; None: it is another C library."""
    try:
        name, version = os.confstr("CS_GNU_LIBC_VERSION").split()
        return tuple(int(part) for part in version.split(".")[:2]) if name == "glibc" else None
    except (AttributeError, OSError, ValueError):
        return None


def _modules():
    try:
        import ensurepip  # noqa: F401
        import venv  # noqa: F401
    except ImportError as error:
        package = "python{0}.{1}-venv".format(*sys.version_info[:2])
        return (
            "expected the modules venv and ensurepip in {0}, got: {1}; install them (Debian, Ubuntu: "
            "sudo apt install {2}), or set PYTHON=/path/to/another/python3".format(sys.executable, error, package)
        )
    try:
        import ctypes
        import lzma
        import sqlite3
        import ssl  # noqa: F401

        del ctypes, lzma, sqlite3
    except ImportError as error:
        return (
            "expected a Python with all of its standard library, got {0} without one of its parts: {1}; "
            "install the part, or set PYTHON=/path/to/another/python3".format(sys.executable, error)
        )
    return None


def _room(directory, vllm):
    """Of the checkout's disk, and of that with uv's cache where it is another."""
    name = ".venv-vllm" if vllm else ".venv"
    caches = os.environ.get("XDG_CACHE_HOME") or os.path.join(os.path.expanduser("~"), ".cache")
    for place in (directory, os.environ.get("UV_CACHE_DIR") or caches):
        while not os.path.isdir(place):
            place = os.path.dirname(os.path.abspath(place))
        free = shutil.disk_usage(place).free / 1e9
        if free < GIGABYTES[name]:
            return (
                "expected {0:.0f} GB of room on the disk for {1}, got {2:.1f} GB at {3}; free some, or move {4}".format(
                    GIGABYTES[name],
                    name,
                    free,
                    place,
                    "the checkout" if place == directory else "the cache: UV_CACHE_DIR",
                )
            )
    return None


def main(arguments):
    """Exit code, after one line on stderr if something is missing."""
    wrong = problem(next((one for one in arguments if one[:2] != "--"), None), "--vllm" in arguments)
    if wrong:
        sys.stderr.write("error: {0}\n".format(wrong))
    return 2 if wrong else 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
