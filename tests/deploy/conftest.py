"""What tests of several rooms look at: a run of known content on the session's broker."""

from collections.abc import AsyncIterator

import pytest_asyncio

from deploy.bus.settings import KafkaSettings
from deploy.surveys.attachment import Attachment
from tests.deploy.surveys.living_run import write_run

RUN = "surveyed"


@pytest_asyncio.fixture(scope="session", loop_scope="session")
async def surveyed(bootstrap_servers: str) -> AsyncIterator[Attachment]:
    """A run on the session's broker."""
    await write_run(bootstrap_servers, RUN)
    yield Attachment(KafkaSettings(bootstrap_servers=bootstrap_servers), RUN)
