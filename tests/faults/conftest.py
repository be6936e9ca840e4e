"""A broker behind a fault proxy for a whole file, and what its tests share."""

import itertools
from collections.abc import AsyncIterator
from pathlib import Path

import pytest

from tests.contract.topics import create_topic
from tests.faults.cluster import FaultyCluster, faulty_cluster

_numbers = itertools.count()


@pytest.fixture
async def faulty(tmp_path: Path) -> AsyncIterator[FaultyCluster]:
    """One node, started for the test."""
    async with faulty_cluster(tmp_path) as started:
        yield started


@pytest.fixture
async def topic(faulty: FaultyCluster) -> str:
    """Two partitions."""
    name = f"faults-{next(_numbers)}"
    await create_topic(faulty.bootstrap_servers, name, 2)
    return name
