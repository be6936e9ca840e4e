"""Commands that break processes on purpose say what came of it, and nothing of what libraries log meanwhile."""

import logging
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import structlog


@contextmanager
def quiet_logs() -> Iterator[None]:
    """Within, logs of this process go nowhere."""
    logger, before = logging.getLogger("aiokafka"), structlog.get_config()
    level = logger.level
    with Path("/dev/null").open("w") as nowhere:
        logger.setLevel(logging.CRITICAL)
        structlog.configure(logger_factory=structlog.WriteLoggerFactory(nowhere))
        try:
            yield
        finally:
            logger.setLevel(level)
            structlog.configure(**before)
