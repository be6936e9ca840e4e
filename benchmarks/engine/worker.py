"""``python -m benchmarks.engine.worker CONFIG MARK``: a worker process as it is.

``MARK``: a file for its engine thread's number.
"""

import sys
import threading
import time
from pathlib import Path

from streamrl.deploy.wiring.process import run_role
from streamrl.settings.loading import load_settings

WORKER = "bench"
ENGINE_THREAD = "vllm-engine"
_POLL_S = 0.005


def tell_thread(mark: Path) -> None:
    """Wait for the engine's thread, and write its number."""
    while True:
        for thread in threading.enumerate():
            if thread.name == ENGINE_THREAD and thread.native_id is not None:
                mark.write_text(str(thread.native_id))
                return
        time.sleep(_POLL_S)


def main(config: str, mark: str) -> None:
    """Run until stopped."""
    threading.Thread(target=tell_thread, args=(Path(mark),), daemon=True).start()
    run_role("worker", load_settings(Path(config), []), WORKER)


if __name__ == "__main__":
    main(*sys.argv[1:])
