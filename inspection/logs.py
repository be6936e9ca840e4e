"""Where the commands that look at runs log: standard error, so that standard output is the answer and nothing else."""

import logging
import sys

import structlog


def log_to_stderr() -> None:
    """Warnings and worse, as plain lines."""
    structlog.configure(
        processors=[
            structlog.processors.add_log_level,
            structlog.processors.format_exc_info,
            structlog.processors.LogfmtRenderer(key_order=["level", "event"]),
        ],
        wrapper_class=structlog.make_filtering_bound_logger(logging.WARNING),
        logger_factory=structlog.PrintLoggerFactory(sys.stderr),
    )
    # Of a broker that goes away the client would log every refused connection; what gives up says so itself.
    logging.getLogger("aiokafka").setLevel(logging.CRITICAL)
