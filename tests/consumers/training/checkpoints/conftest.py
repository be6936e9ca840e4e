import uuid
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.consumers.training.checkpoints.damaged_storage import Storage, make_bucket, s3_environment, s3_server


@pytest.fixture(scope="session")
def s3_endpoint() -> Iterator[str]:
    with s3_server() as endpoint:
        make_bucket(endpoint, "bucket")
        yield endpoint


@pytest.fixture
def s3_storage(s3_endpoint: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Storage:
    for name, value in s3_environment(s3_endpoint).items():
        monkeypatch.setenv(name, value)
    return Storage(f"s3://bucket{tmp_path}", tmp_path)


@pytest.fixture
def local_storage(tmp_path: Path) -> Storage:
    return Storage(tmp_path / "checkpoints", tmp_path)


@pytest.fixture
def memory_storage(tmp_path: Path) -> Storage:
    return Storage(f"memory://{uuid.uuid4().hex}", tmp_path)


@pytest.fixture(params=["local", "memory", "s3"])
def storage(request: pytest.FixtureRequest) -> Storage:
    found: Storage = request.getfixturevalue(f"{request.param}_storage")
    return found
