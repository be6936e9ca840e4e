import io
from contextlib import redirect_stdout

import structlog

from deploy.wiring.process import configure_logging
from observability.tracing.context import Context, LoggedTraces


def test_lines_on_a_traced_group_or_trajectory_name_the_trace() -> None:
    logged, output = LoggedTraces(), io.StringIO()
    with redirect_stdout(output):
        configure_logging({"run": "demo", "process": "worker-1", "worker": "worker-1"}, logged)
        log = structlog.get_logger()
        log.info("before", group="a/0/0")
        logged.note("a/0/0", Context(0xABC, 1))
        log.info("of group", group="a/0/0")
        with structlog.contextvars.bound_contextvars(trajectory="a/0/0/3"):
            log.info("of trajectory")
        log.info("of another", trajectory="a/1/0/3")
    structlog.reset_defaults()
    before, of_group, of_trajectory, of_another = output.getvalue().splitlines()
    assert "trace_id" not in before
    assert "trace_id" not in of_another
    for line in (of_group, of_trajectory):
        assert f"trace_id={0xABC:032x}" in line
    for part in ("run=demo", "worker=worker-1", "trajectory=a/0/0/3"):
        assert part in of_trajectory
