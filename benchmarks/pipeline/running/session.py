"""One run of `streamrl run` as its own process on a broker that stays, and what it left on its topics."""

import os
import subprocess
import sys
import time
from pathlib import Path

from schemas.errors import StreamRLError

LONGEST_S = 900.0


def run_pipeline(configuration: Path, log: Path) -> float:
    """Run it to its end; seconds it took.

    Raises:
        StreamRLError: it failed, or took too long; the text ends with its last line.
    """
    began = time.monotonic()
    command = [sys.executable, "-m", "streamrl.cli.app", "run", str(configuration)]
    with log.open("wb") as output:
        child = subprocess.Popen(command, stdout=output, stderr=output, env={**os.environ, "OMP_NUM_THREADS": "1"})
        try:
            code = child.wait(LONGEST_S)
        except subprocess.TimeoutExpired as error:
            raise StreamRLError(f"expected {configuration} to end within {LONGEST_S:.0f} s, it still ran") from error
        finally:
            if child.poll() is None:
                child.terminate()
                child.wait(60)
    if code != 0:
        last = (log.read_text(errors="replace").strip().splitlines() or ["no output"])[-1]
        raise StreamRLError(f"expected a run of {configuration} that ends well, got code {code}: {last}")
    return time.monotonic() - began
