"""Checkpoint storages whose files tests can damage, and small checkpoints to write to them."""

import logging
import os
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from http.client import HTTPConnection
from pathlib import Path
from typing import Any

import obstore
import torch
from moto.moto_server.werkzeug_app import DomainDispatcherApplication, create_backend_app
from safetensors.torch import save_file
from werkzeug.serving import make_server

from streamrl.consumers.ingest.ledger import KnownRecord
from streamrl.consumers.training.checkpoints.catalogue import Lineage
from streamrl.consumers.training.checkpoints.manifest import CLEARED, CheckpointManifest, SkipSummary
from streamrl.consumers.training.checkpoints.storage import CheckpointStorage, ObjectStorage, open_storage
from streamrl.consumers.training.checkpoints.store import CheckpointStore, TrainerState, VerifiedCheckpoint
from streamrl.schemas.identifiers import PolicyVersion

FILES = (
    "model.safetensors",
    "config.json",
    "trainer_state/optimizer.safetensors",
    "trainer_state/rng.safetensors",
    "trainer_state/intake.json",
    "trainer_state/report.bin",
    "trainer_state/manifest.json",
)


def manifest_of(lineage: int, step: int, parent: PolicyVersion | None = None, **changes: Any) -> CheckpointManifest:
    options: dict[str, Any] = {
        "run": "r",
        "algorithm": "grpo",
        "lineage": lineage,
        "parent": parent,
        "step": step,
        "policy_version": PolicyVersion(lineage, step),
        "frontier": {"0": {"low": step, "done": [step + 2]}},
        "anchors": {"0": KnownRecord(offset=0, trajectory_id="p/0/0/0")},
        "skips": SkipSummary(count=2, hash="ab", by_reason={"stale": 2}),
        "tokens_seen": 10 * step,
        "prompt_cursor": step,
        "config_hash": "0",
        "created_at": 1.5,
    }
    return CheckpointManifest(**(options | changes))


def state_of(lineage: int, step: int, parent: PolicyVersion | None = None) -> TrainerState:
    return TrainerState(
        manifest_of(lineage, step, parent),
        {"w.exp_avg": torch.full((3,), float(step))},
        {"cpu": torch.arange(16, dtype=torch.uint8)},
        {"seen": ["p/0/0/0"]},
        b"report of %d" % step,
    )


def write_model(directory: Path) -> None:
    save_file({"w": torch.ones(2)}, directory / "model.safetensors")
    (directory / "config.json").write_text("{}")


def write(
    opened: CheckpointStorage, step: int, lineage: Lineage, parent: PolicyVersion | None = None, keep: int = 3
) -> str:
    store = CheckpointStore(opened, keep)
    return store.write(state_of(lineage.number, step, parent), write_model, lineage)


def versions(opened: CheckpointStorage) -> list[tuple[int, int]]:
    return [(found.lineage, found.step) for found in CheckpointStore(opened, 3).manifests()]


def newest(opened: CheckpointStorage) -> tuple[int, int]:
    restored = CheckpointStore(opened, 3).newest()
    assert restored is not None
    return identity(restored)


def identity(restored: VerifiedCheckpoint) -> tuple[int, int]:
    manifest = restored.state.manifest
    assert torch.equal(restored.state.optimizer["w.exp_avg"], torch.full((3,), float(manifest.step)))
    assert (restored.directory / "model.safetensors").exists()
    return manifest.lineage, manifest.step


@dataclass
class Storage:
    """One storage. Each call of ``open`` opens it as another machine would, with a new cache."""

    url: str | Path
    root: Path
    opened_count: int = field(default=0)

    def open(self) -> CheckpointStorage:
        self.opened_count += 1
        return open_storage(self.url, self.root / f"cache-{self.opened_count}")

    def read(self, lineage: int, step: int, name: str) -> bytes:
        opened = self.open()
        key = f"{opened.slot(lineage, step).name}/{name}"
        if isinstance(opened, ObjectStorage):
            return bytes(obstore.get(opened.store, key).bytes())
        return (self.root / "checkpoints" / key).read_bytes()

    def put(self, lineage: int, step: int, name: str, content: bytes | None) -> None:
        """Replace a file's content; None: delete it."""
        opened = self.open()
        key = f"{opened.slot(lineage, step).name}/{name}"
        path = self.root / "checkpoints" / key
        if isinstance(opened, ObjectStorage):
            obstore.delete(opened.store, key) if content is None else obstore.put(opened.store, key, content)
        elif content is None:
            path.unlink()
        else:
            path.write_bytes(content)

    def names(self) -> set[str]:
        """The paths of all stored files, without the markers of cleared uploads."""
        opened = self.open()
        if isinstance(opened, ObjectStorage):
            listed = (item for chunk in obstore.list(opened.store) for item in chunk)
            return {item["path"] for item in listed if item["size"] != len(CLEARED)}
        return {str(path.relative_to(self.url)) for path in Path(self.url).rglob("*") if path.is_file()}


@contextmanager
def s3_server() -> Iterator[str]:
    """Run an S3 server in this process; yields its endpoint.

    It serves one request at a time, so that its conditional writes are atomic.
    """
    logging.getLogger("werkzeug").setLevel(logging.ERROR)
    server = make_server("127.0.0.1", 0, DomainDispatcherApplication(create_backend_app), threaded=False)
    thread = threading.Thread(target=server.serve_forever, daemon=True)
    thread.start()
    try:
        yield f"http://127.0.0.1:{server.server_port}"
    finally:
        server.shutdown()
        thread.join()
        server.server_close()


def s3_environment(endpoint: str) -> dict[str, str]:
    return {
        "AWS_ENDPOINT_URL": endpoint,
        "AWS_ACCESS_KEY_ID": "testing",
        "AWS_SECRET_ACCESS_KEY": "testing",
        "AWS_REGION": "us-east-1",
    }


def make_bucket(endpoint: str, name: str) -> None:
    connection = HTTPConnection(endpoint.removeprefix("http://"))
    connection.request("PUT", f"/{name}")
    assert connection.getresponse().status == 200
    connection.close()


def own_environment(**changes: str) -> dict[str, str]:
    return dict(os.environ) | changes
