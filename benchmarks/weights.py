"""``python -m benchmarks.weights``: what new weights cost trainer, network and workers, by the way they take.

SmolLM2-135M is trained in bfloat16 by the trainer's own policy, in its own thread, on made-up samples. After every step
the weights go to the store, and from a relay to two workers of one host, which adopt them into the transformers engine.
Relay and workers are another process. The paths take turns in one run, a few steps each:

- today: cast, written, hashed and digested in the thread that trains; each worker fetches into a cache of its own;
- pinned: copied there, and the rest done beside the next step; the workers share a cache;
- delta: the same, and what is fetched is the difference to the version before;
- lora: as pinned, of a policy of which an adapter of rank 16 of all linear layers is trained; its steps cost less.

The trainer's stall is the time between an optimizer step and the next micro-batch for which its thread cannot compute:
all of the export, or the copy and what has to be waited for. ``stalled_cpu_share`` is the same of the thread's
processor time, which other processes of a busy machine change less. ``compute_ratio`` tells what a step's own computing
takes while the export goes on, relative to *today*, where nothing goes on beside it: on a machine whose cores are all
busy what is no stall is paid there. ``peak_mib``: of the trainer's process, in which both policies are, each with its
moments: the paths' differences count.
"""

import argparse
import asyncio
import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
from collections import defaultdict
from collections.abc import AsyncIterator, Callable, Iterator
from contextlib import asynccontextmanager, contextmanager
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any, TextIO

import cramjam
import numpy as np
import torch

from benchmarks.conditions import conditions
from streamrl.bus.embedded.node import free_ports
from streamrl.consumers.algorithms.settings import AlgorithmSettings
from streamrl.consumers.training.checkpoints.storage import open_storage
from streamrl.consumers.training.model import named_tensors, with_floats_as
from streamrl.consumers.training.policy import ComputeThread, PolicyPaths, TrainedPolicy, digests_of
from streamrl.consumers.training.settings import LoraSettings, TrainingSettings
from streamrl.init.smollm2 import ensure_smollm2
from streamrl.planning.measuring import synthetic
from streamrl.producers.generation.engines.slots import SlotDecoder
from streamrl.producers.generation.settings import GenerationSettings
from streamrl.schemas.control import WeightsReady
from streamrl.schemas.errors import StreamRLError
from streamrl.schemas.identifiers import PolicyVersion
from streamrl.schemas.weight_deltas import apply_deltas, write_delta
from streamrl.schemas.weights import WEIGHTS
from streamrl.weights.export import WeightExporter
from streamrl.weights.fetch import WeightsFetcher
from streamrl.weights.relay.server import Relay
from streamrl.weights.settings import RelaySettings
from streamrl.weights.store import WeightStore

RESULTS = Path(__file__).parent / "results" / "weights.json"
MODEL = "SmolLM2-135M-Instruct"
PATHS = ("today", "pinned", "delta", "lora")
LORA_RANK = 16
WORKERS = 2
LEARNING_RATE = 1e-6
"""The default of ``training.learning_rate``, and usual for such models: how much changes in a step depends on it."""


def main(arguments: list[str] | None = None) -> dict[str, Any]:
    """Measure as the arguments say."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.weights", description=__doc__)
    parser.add_argument("--rounds", type=int, default=3, help="turns of each path")
    parser.add_argument("--steps", type=int, default=4, help="of a turn, the first of which is not counted")
    parser.add_argument("--micro-batches", type=int, default=4, help="of a step")
    parser.add_argument("--rows", type=int, default=2, help="sequences of a micro-batch")
    parser.add_argument("--length", type=int, default=128, help="tokens of a sequence")
    parser.add_argument("--results", type=Path, default=RESULTS)
    options = parser.parse_args(arguments)
    began, model = time.monotonic(), ensure_smollm2(print)
    with tempfile.TemporaryDirectory(prefix="streamrl-weights-") as scratch, _host(Path(scratch), model) as host:
        bench = Bench(options, model, Path(scratch), host)
        result = asyncio.run(bench.run())
    command = f"make bench-weights ARGS='--rounds {options.rounds} --steps {options.steps}'"
    result["conditions"] = conditions(began, 0, ["torch", "transformers", "safetensors", "cramjam"], command)
    options.results.write_text(json.dumps(result, indent=2) + "\n")
    print(json.dumps(result, indent=2))
    return result


@dataclass
class Observed:
    """One step of a path: seconds on the clock, of which the trainer's thread was stalled, and on the processor.

    ``thread_s``: processor seconds of the thread that trains, ``stalled_thread_s`` of them for the weights; ``cpu_s``:
    of the whole trainer. ``adopted_s``: from the end of the optimizer step until the last worker has the weights.
    """

    step_s: float
    stall_s: float
    thread_s: float
    stalled_thread_s: float
    cpu_s: float
    adopted_s: float = 0.0
    host: dict[str, float] = field(default_factory=dict)


class Bench:
    """The trainer's side."""

    def __init__(self, options: argparse.Namespace, model: Path, scratch: Path, host: "subprocess.Popen[str]") -> None:
        self.options = options
        self.host = host
        self.scratch = scratch
        training = TrainingSettings(
            learning_rate=LEARNING_RATE, dtype="bfloat16", device="cpu", threads=1, max_grad_norm=1e9
        )
        self.compute, self.exporter = ComputeThread(1), ComputeThread(1)
        self.stores = {
            path: WeightExporter(scratch / path, 3, "delta" if path == "delta" else "full") for path in PATHS
        }
        paths = PolicyPaths(str(model), open_storage(scratch / "checkpoints", scratch), scratch / "unused")
        adapted = training.model_copy(update={"lora": LoraSettings(rank=LORA_RANK)})
        self.open_policy = {
            is_adapted: partial(TrainedPolicy, paths, AlgorithmSettings(), settings, 256, None, 0)
            for is_adapted, settings in ((False, training), (True, adapted))
        }
        self.policies: dict[bool, TrainedPolicy] = {}
        self.batch = synthetic(options.rows, options.length, 1 << 15)
        self.observed: dict[str, list[Observed]] = defaultdict(list)
        self.peaks: dict[str, float] = defaultdict(float)
        self.exporting: asyncio.Task[str] | None = None
        self.adopting: list[asyncio.Task[None]] = []
        self.one_at_a_time = asyncio.Lock()

    async def run(self) -> dict[str, Any]:
        """Rows of all paths, and the codecs on the last two versions."""
        for is_adapted, open_policy in self.open_policy.items():
            self.policies[is_adapted] = await self.compute(open_policy)
        try:
            for turn in range(self.options.rounds):
                for path in PATHS[turn % len(PATHS) :] + PATHS[: turn % len(PATHS)]:
                    reset_peak()
                    for index in range(self.options.steps):
                        found = await self.step(path)
                        if index:
                            self.observed[path].append(found)
                    await self.settle()
                    self.peaks[path] = max(self.peaks[path], peak_mib())
                    print(f"turn {turn + 1}: {path}: {self.observed[path][-1]}", flush=True)
            codecs = codecs_on(*self.consecutive())
        finally:
            self.exporter.close()
            self.compute.close()
        rows = [self.row(path) for path in PATHS]
        return {"rows": rows, "codecs": codecs, "workers_of_the_host": WORKERS, "learning_rate": LEARNING_RATE}

    async def step(self, path: str) -> Observed:
        """One optimizer step, and its weights on their way."""
        policy = self.policies[path == "lora"]
        began, spent, thread = time.monotonic(), time.process_time(), await self.compute(time.thread_time)
        for _ in range(self.options.micro_batches):
            await self.compute(policy.accumulate, self.batch)
        outcome = await self.compute(policy.finish_step, 1.0)
        if not outcome.applied:
            raise StreamRLError(f"expected an optimizer step on made-up samples, got: {outcome.problem}")
        stepped, version = time.monotonic(), PolicyVersion(1, policy.step)
        thread_stepped = await self.compute(time.thread_time)
        if path == "today":
            sha256 = await self.compute(self.exported_in_line, version)
            self.exporting = asyncio.create_task(_known(sha256))
        else:
            # The one before, in whose memory the copy is made.
            if self.exporting is not None:
                await self.exporting
            snapshot = await self.compute(policy.snapshot)
            export = partial(self.exported_beside, path, snapshot, version)
            self.exporting = asyncio.create_task(self.exporter(export))
        now, thread_now = time.monotonic(), await self.compute(time.thread_time)
        found = Observed(
            step_s=now - began,
            stall_s=now - stepped,
            thread_s=thread_now - thread,
            stalled_thread_s=thread_now - thread_stepped,
            cpu_s=time.process_time() - spent,
        )
        self.adopting.append(asyncio.create_task(self.adopt(path, version, self.exporting, stepped, found)))
        return found

    def exported_in_line(self, version: PolicyVersion) -> str:
        """What the trainer did after each step, where it trains."""
        tensors = named_tensors(self.policies[False].learner.model)
        texts = self.policies[False]._texts("bfloat16")  # noqa: SLF001
        sha256 = self.stores["today"].export(with_floats_as(torch.bfloat16, tensors), texts, version, version.number, 0)
        digests_of(tensors)
        return sha256

    def exported_beside(self, path: str, snapshot: Any, version: PolicyVersion) -> str:
        """What it does beside the next step."""
        tensors = with_floats_as(torch.bfloat16, snapshot.tensors)
        policy = self.policies[path == "lora"]
        texts, adapter = policy._texts("bfloat16"), policy.adapter  # noqa: SLF001
        sha256 = self.stores[path].export(tensors, texts, version, version.number, 0, adapter)
        snapshot.digests()
        return sha256

    async def adopt(
        self, path: str, version: PolicyVersion, exporting: "asyncio.Task[str]", stepped: float, found: Observed
    ) -> None:
        """Have the workers fetch and adopt a version once it is exported."""
        assert self.host.stdin is not None
        assert self.host.stdout is not None
        job = {"path": path, "version": str(version), "sha256": await exporting}
        async with self.one_at_a_time:
            self.host.stdin.write(json.dumps(job) + "\n")
            self.host.stdin.flush()
            found.host = json.loads(await asyncio.to_thread(self.host.stdout.readline))
        found.adopted_s = found.host["adopted_at"] - stepped  # Linux's monotonic clock is one for all processes

    async def settle(self) -> None:
        """Wait for what is under way: the next path begins with nothing beside it."""
        await asyncio.gather(*self.adopting)
        self.adopting, self.exporting = [], None

    def consecutive(self) -> tuple[Path, Path]:
        """The files of the last two versions of one turn, in bfloat16."""
        before, last = self.stores["delta"].versions()[-2:]
        assert last.number == before.number + 1
        return self.scratch / "delta" / str(before) / WEIGHTS, self.scratch / "delta" / str(last) / WEIGHTS

    def row(self, path: str) -> dict[str, Any]:
        """Medians over a path's counted steps."""
        found = self.observed[path]

        def median(of: Callable[[Observed], float]) -> float:
            return statistics.median(of(each) for each in found)

        plain = statistics.median(each.step_s - each.stall_s for each in self.observed["today"])
        return {
            "model": MODEL,
            "path": path,
            "stall_share": round(median(lambda each: each.stall_s / each.step_s), 4),
            "bytes": round(median(lambda each: each.host["bytes"])),
            "stalled_cpu_share": round(median(lambda each: each.stalled_thread_s / each.thread_s), 4),
            "adopted_s": round(median(lambda each: each.adopted_s), 2),
            "stall_s": round(median(lambda each: each.stall_s), 3),
            "step_s": round(median(lambda each: each.step_s), 2),
            "compute_ratio": round(median(lambda each: each.step_s - each.stall_s) / plain, 3),
            "trainer_cpu_s": round(median(lambda each: each.cpu_s), 2),
            "peak_mib": round(self.peaks[path]),
            "host_cpu_s": round(median(lambda each: each.host["cpu_s"]), 2),
            "steps": len(found),
        }


def reset_peak() -> None:
    """Let the peak of this process's memory begin here (Linux: proc(5), clear_refs)."""
    Path("/proc/self/clear_refs").write_text("5")


def peak_mib() -> float:
    """Of resident memory, since."""
    line = next(line for line in Path("/proc/self/status").read_text().splitlines() if line.startswith("VmHWM"))
    return int(line.split()[1]) / 1024


def codecs_on(before: Path, new: Path) -> list[dict[str, Any]]:
    """Ways to write what one version differs by from the one before: their share of its bytes, and MB/s of it."""
    old, young = (np.fromfile(path, dtype="<u2") for path in (before, new))
    size, target = new.stat().st_size, new.parent.parent / "codec"
    changed = float(np.mean(old != young))

    def timed(name: str, write: Callable[[], int], read: Callable[[], Any]) -> dict[str, Any]:
        began = time.process_time()
        written = write()
        wrote = time.process_time()
        read()
        done = time.process_time()
        return {
            "codec": name,
            "share": round(written / size, 5),
            "write_mb_s": round(size / 1e6 / (wrote - began)),
            "read_mb_s": round(size / 1e6 / (done - wrote)),
            "changed": round(changed, 5),
        }

    def ours() -> int:
        write_delta(before, new, 2, target)
        return target.stat().st_size

    packed: dict[str, Any] = {}

    def pack(name: str, data: Any) -> int:
        packed[name] = cramjam.zstd.compress(np.ascontiguousarray(data).view(np.uint8).reshape(-1).data, level=1)
        return len(packed[name])

    def planes() -> Any:
        return (old ^ young).view(np.uint8).reshape(-1, 2).T

    def bits() -> int:
        where = old != young
        return pack("bits", np.packbits(where)) + pack("values", (old ^ young)[where])

    def unpack(*names: str) -> None:
        for name in names:
            cramjam.zstd.decompress(packed[name])

    return [
        timed(
            "gaps and differences in planes (ours)",
            ours,
            lambda: apply_deltas(before, [target], target.parent / "made"),
        ),
        timed("XOR, zstd", lambda: pack("xor", old ^ young), lambda: unpack("xor")),
        timed("XOR in planes, zstd", lambda: pack("planes", planes()), lambda: unpack("planes")),
        timed("bit mask and XOR of what changed, zstd", bits, lambda: unpack("bits", "values")),
    ]


async def _known(sha256: str) -> str:
    return sha256


@contextmanager
def _host(scratch: Path, model: Path) -> Iterator["subprocess.Popen[str]"]:
    """The process of the relay and the workers."""
    command = [sys.executable, "-c", "from benchmarks.weights import serve; import sys; serve(*sys.argv[1:])"]
    process = subprocess.Popen(
        [*command, str(scratch), str(model)], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    )
    try:
        assert process.stdout is not None
        if process.stdout.readline() != "ready\n":
            raise StreamRLError("expected the workers' process to become ready, got its end; its log is above")
        yield process
    finally:
        process.stdin.close()  # type: ignore[union-attr]
        process.wait()


def serve(scratch: str, model: str) -> None:
    """The workers' process: a line of JSON in for each version, one out when all workers have adopted it."""
    answers = os.fdopen(os.dup(sys.stdout.fileno()), "w")
    os.dup2(sys.stderr.fileno(), sys.stdout.fileno())  # logs and libraries print, too
    # On another file system, as a host of its own: on the store's, a relay's files would be linked and not fetched.
    with tempfile.TemporaryDirectory(prefix="streamrl-weights-", dir="/dev/shm") as host:
        asyncio.run(_serve(Path(scratch), Path(host), model, answers))


async def _serve(scratch: Path, host: Path, model: str, answers: TextIO) -> None:
    sent = {"bytes": 0}

    def note(_status: int, size: int) -> None:
        sent["bytes"] += size

    decoders = []
    for _ in range(WORKERS):
        decoder = SlotDecoder(model, GenerationSettings(dtype="bfloat16", device="cpu", threads=1))
        decoder.load()
        decoders.append(decoder)
    fetchers = {
        path: [WeightsFetcher(host / (f"today-{number}" if path == "today" else path)) for number in range(WORKERS)]
        for path in PATHS
    }
    async with _relays(scratch, note) as addresses:
        print("ready", file=answers, flush=True)
        while line := await asyncio.to_thread(sys.stdin.readline):
            job = json.loads(line)
            version, path = PolicyVersion.parse(job["version"]), job["path"]
            ready = WeightsReady(
                sequence=version.number,
                sent_at=0.0,
                version=version,
                step=version.number,
                manifest_sha256=job["sha256"],
                relays=(addresses[path],),
            )
            sent["bytes"], spent = 0, time.process_time()

            async def adopt(fetcher: WeightsFetcher, decoder: SlotDecoder, ready: WeightsReady) -> None:
                directory = await fetcher.fetch(ready)
                decoder.adopt(await asyncio.to_thread(decoder.read_weights, directory))
                await asyncio.to_thread(fetcher.keep_only, {ready.version})

            await asyncio.gather(*(adopt(*pair, ready) for pair in zip(fetchers[path], decoders, strict=True)))
            answer = {"adopted_at": time.monotonic(), "cpu_s": time.process_time() - spent, "bytes": sent["bytes"]}
            print(json.dumps(answer), file=answers, flush=True)


@asynccontextmanager
async def _relays(scratch: Path, note: Callable[[int, int], None]) -> AsyncIterator[dict[str, str]]:
    """A relay for the store of each path; their addresses."""
    stop, ports = asyncio.Event(), free_ports(len(PATHS))
    relays = [
        Relay(WeightStore(scratch / path), RelaySettings(port=port), note)
        for path, port in zip(PATHS, ports, strict=True)
    ]
    serving = [asyncio.create_task(relay.run(stop)) for relay in relays]
    await asyncio.sleep(0.5)
    try:
        yield {path: f"http://127.0.0.1:{port}" for path, port in zip(PATHS, ports, strict=True)}
    finally:
        stop.set()
        await asyncio.gather(*serving)


if __name__ == "__main__":
    main()
