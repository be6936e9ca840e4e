import subprocess
import sys

import pytest

pytestmark = pytest.mark.processes

WITHOUT_OPENMP = """
import ctypes
from pathlib import Path
real = ctypes.cdll.LoadLibrary
def load(path):
    # As the loader does where the system has no OpenMP: found only if it is in the process already.
    if "lightgbm" in str(path) and "libgomp.so.1" not in Path("/proc/self/maps").read_text():
        raise OSError("libgomp.so.1: cannot open shared object file: No such file or directory")
    return real(path)
ctypes.cdll.LoadLibrary = load
from streamrl.producers.lengths.learned.model import import_lightgbm
assert import_lightgbm().Dataset
assert "torch/lib/libgomp.so.1" in Path("/proc/self/maps").read_text()
"""


def test_lengths_are_learned_where_only_torch_has_an_openmp_library() -> None:
    """As on a machine that never had a compiler."""
    done = subprocess.run(
        [sys.executable, "-c", WITHOUT_OPENMP], capture_output=True, text=True, timeout=120, check=False
    )
    assert done.returncode == 0, done.stderr
