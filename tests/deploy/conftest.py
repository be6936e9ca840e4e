"""What tests of several rooms look at: a run of known content on the session's broker."""

import pytest_asyncio

from bus.kafka.settings import KafkaSettings
from inspection.diagnostics.connect import Attachment
from tests.inspection.diagnostics.living_run import beat, write_run

RUN = "surveyed"


@pytest_asyncio.fixture(scope="session", loop_scope="session")
async def written_run(bootstrap_servers: str) -> Attachment:
    """A run on the session's broker."""
    await write_run(bootstrap_servers, RUN)
    return Attachment(KafkaSettings(bootstrap_servers=bootstrap_servers), RUN)


@pytest_asyncio.fixture(loop_scope="session")
async def surveyed(bootstrap_servers: str, written_run: Attachment) -> Attachment:
    """The same run, its workers just heard of."""
    await beat(bootstrap_servers, RUN)
    return written_run
