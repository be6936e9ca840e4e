"""``python -m benchmarks.engine.worker CONFIG CORE MARK``: a worker process as it is, its engine's thread on one core.

Everything else stays on the cores that the process was started on. ``MARK``: a file for the engine thread's number.
"""

import os
import sys
import threading
import time
from pathlib import Path

from deploy.wiring.process import run_role
from settings.loading import load_settings

WORKER = "bench"
ENGINE_THREAD = "vllm-engine"
_POLL_S = 0.005


def place(core: str, mark: Path) -> None:
    """Wait for the engine's thread; put it where it belongs, before it has made threads of its own."""
    while True:
        for thread in threading.enumerate():
            if thread.name == ENGINE_THREAD and thread.native_id is not None:
                if core:
                    os.sched_setaffinity(thread.native_id, {int(core)})
                mark.write_text(str(thread.native_id))
                return
        time.sleep(_POLL_S)


def main(config: str, core: str, mark: str) -> None:
    """Run until stopped."""
    threading.Thread(target=place, args=(core, Path(mark)), daemon=True).start()
    run_role("worker", load_settings(Path(config), []), WORKER)


if __name__ == "__main__":
    main(*sys.argv[1:])
