"""What our engine leaves of the process in which vLLM then starts: a rank of its own can still start from it."""

import json
import os
import subprocess
import sys
import warnings
from importlib.metadata import PackageNotFoundError
from pathlib import Path
from typing import Any

import pytest

from streamrl.producers.generation.engines import vllm_decoder

PROGRAM = """
import asyncio, json, os, sys, torch
from multiprocessing import get_context
from streamrl.producers.generation.engines.threaded import ThreadedEngine
from streamrl.producers.generation.engines.vllm_decoder import VllmDecoder
from streamrl.producers.generation.settings import GenerationSettings


class StoppedAtVllm(VllmDecoder):
    async def _open_core(self):
        reader, writer = os.pipe()
        if not os.fork():
            os.write(writer, b"bad" if torch._C._cuda_isInBadFork() else b"good")
            os._exit(0)
        os.wait()
        with self._group.spawning():
            rank = get_context("spawn").Process(target=print)
        print(json.dumps({
            "fork": os.read(reader, 8).decode(),
            "cuda": torch.cuda.is_initialized(),
            "rank": dict(rank.member.environment),
            "environment": {name: value for name, value in os.environ.items() if name[:4] in ("VLLM", "OMP_", "CUDA")},
        }), flush=True)
        os._exit(0)


settings = GenerationSettings(engine="vllm", tensor_parallel_size=2, threads=3)
asyncio.run(ThreadedEngine(StoppedAtVllm(sys.argv[1], settings), 8).start())
"""


def state_at_vllm(model: Path, directory: Path) -> dict[str, Any]:
    """The process's state when vLLM would be imported, with a package of that name and nothing in it."""
    (directory / "vllm").mkdir()
    (directory / "vllm" / "__init__.py").touch()
    about = directory / "vllm-0.32.0.dist-info"
    about.mkdir()
    (about / "METADATA").write_text("Metadata-Version: 2.1\nName: vllm\nVersion: 0.32.0\n")
    paths = os.pathsep.join([str(directory), str(Path.cwd())])
    done = subprocess.run(
        [sys.executable, "-c", PROGRAM, str(model)],
        env=os.environ | {"PYTHONPATH": paths, "CUDA_VISIBLE_DEVICES": "2,5", "TMPDIR": str(directory)},
        capture_output=True,
        text=True,
        check=True,
        timeout=120,
    )
    state: dict[str, Any] = json.loads(done.stdout)
    return state


@pytest.mark.processes
def test_cuda_is_untouched_and_ranks_are_spawned(model_dir: Path, tmp_path: Path) -> None:
    state = state_at_vllm(model_dir, tmp_path)
    assert (state["fork"], state["cuda"]) == ("good", False)
    assert state["environment"]["VLLM_WORKER_MULTIPROC_METHOD"] == "spawn"
    assert state["rank"]["OMP_NUM_THREADS"] == "3"
    # The devices of the worker's place, of which each rank takes one.
    assert state["environment"]["CUDA_VISIBLE_DEVICES"] == "2,5"
    assert "VLLM_CPU_OMP_THREADS_BIND" not in state["environment"]


@pytest.mark.parametrize(("found", "binds_nobody"), [("0.32.0+cpu", True), ("0.32.0", False), (None, True)])
def test_the_build_for_cpus_is_known_by_its_version(
    found: str | None, binds_nobody: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    def version(name: str) -> str:
        assert name == "vllm"
        if found is None:  # its build for CPUs is installed as vllm-cpu
            raise PackageNotFoundError(name)
        return found

    monkeypatch.setattr(vllm_decoder, "version", version)
    monkeypatch.setattr(os, "environ", {})
    with warnings.catch_warnings():
        vllm_decoder.set_vllm_environment(3)
    assert (os.environ.get("VLLM_CPU_OMP_THREADS_BIND") == "nobind") is binds_nobody
    assert ("TORCHDYNAMO_DISABLE" in vllm_decoder.process_environment(3)) is binds_nobody
