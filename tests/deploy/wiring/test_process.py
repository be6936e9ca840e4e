import io
import threading
from contextlib import redirect_stdout

import structlog

from streamrl.deploy.wiring.process import configure_logging


def test_every_line_names_run_and_process_whatever_thread_it_is_of() -> None:
    names, output = {"run": "demo", "process": "worker"}, io.StringIO()
    with redirect_stdout(output):
        configure_logging(names)
        log = structlog.get_logger()
        names["process"] = names["worker"] = "worker-1"
        log.info("here")
        thread = threading.Thread(target=lambda: log.info("there", worker="another"))
        thread.start()
        thread.join()
    structlog.reset_defaults()
    here, there = output.getvalue().splitlines()
    assert "run=demo" in here
    assert "process=worker-1" in here
    assert "worker=worker-1" in here
    assert "worker=another" in there
    assert "run=demo" in there
