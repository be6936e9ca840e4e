"""Our side: orders on a topic of an embedded Kafka, a worker process on vLLM, trajectories on a topic, decoded."""

import asyncio
import os
import subprocess
import time
from collections.abc import AsyncIterator, Mapping
from contextlib import asynccontextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import psutil
from safetensors.torch import load_file

from benchmarks.engine.worker import WORKER
from benchmarks.engine.workload import Workload
from streamrl.bus.embedded.process import die_with_parent
from streamrl.bus.kafka.bus import KafkaBus
from streamrl.bus.kafka.settings import KafkaSettings
from streamrl.bus.kafka.topic_admin import apply_topics
from streamrl.bus.port import Outgoing, Publisher, Subscription
from streamrl.planning.measuring import open_relay
from streamrl.schemas.control import WeightsReady
from streamrl.schemas.identifiers import PolicyVersion, make_group_id, make_prompt_id, partition_of_worker
from streamrl.schemas.reports import Heartbeat, WorkerState
from streamrl.schemas.topics import CONTROL, HEARTBEATS, TRAJECTORIES, WORK_ORDERS
from streamrl.schemas.trajectories import LengthEstimate, Prompt, SamplingParams, Trajectory, WorkOrder
from streamrl.settings.placement import ProcessPlace
from streamrl.weights.export import WeightExporter

RUN, DATASET = "engine-bench", "bench"
FIRST = PolicyVersion(1, 0)
PARTITIONS = 4
LOG = "worker.log"
START_S, STRETCH_S, IDLE_S = 300.0, 300.0, 3.0


@dataclass(frozen=True)
class Stretch:
    """``seconds`` from the first order's publishing to the last trajectory's decoding.

    ``cpu_s``: what was spent for it, by whom; what they spend in the same time with nothing to do is taken off.
    """

    tokens: int
    seconds: float
    cpu_s: Mapping[str, float]


@dataclass
class Pipeline:
    """What stands between two stretches: a worker that has its weights, and clients beside it."""

    workload: Workload
    worker: subprocess.Popen[bytes]
    engine_thread: int
    broker: int
    publisher: Publisher
    trajectories: Subscription
    idle: Mapping[str, float]

    @classmethod
    async def standing(cls, **parts: Any) -> "Pipeline":
        """With ``idle``, seconds of processor time a second, measured while nothing is ordered."""
        pipeline = cls(**parts, idle={})
        before = pipeline._spent()
        await asyncio.sleep(IDLE_S)
        pipeline.idle = {name: (after - before[name]) / IDLE_S for name, after in pipeline._spent().items()}
        return pipeline

    async def stretch(self, number: int) -> Stretch:
        """Order a stretch's groups at once, and read until all of their trajectories are there."""
        orders = [self._order(number, index, *group) for index, group in enumerate(self._groups(number))]
        before, began = self._spent(), time.perf_counter()
        topic, partition = WORK_ORDERS.full_name(RUN), partition_of_worker(WORKER)
        for order in orders:
            await self.publisher.submit(Outgoing.of(topic, order, key=order.group_id, partition=partition))
        tokens = finished = 0
        async with asyncio.timeout(STRETCH_S):
            while finished < self.workload.trajectories:
                for record in await self.trajectories.poll():
                    trajectory = record.message()
                    assert isinstance(trajectory, Trajectory)
                    assert not trajectory.reward_errors
                    tokens, finished = tokens + len(trajectory.token_ids), finished + 1
        seconds = time.perf_counter() - began
        return Stretch(
            tokens,
            seconds,
            {name: after - before[name] - seconds * self.idle[name] for name, after in self._spent().items()},
        )

    def _groups(self, number: int) -> list[tuple[str, int]]:
        return list(zip(self.workload.prompts(number), self.workload.limits(), strict=True))

    def _order(self, stretch: int, index: int, text: str, limit: int) -> WorkOrder:
        prompt_id = make_prompt_id(DATASET, index)
        return WorkOrder(
            group_id=make_group_id(prompt_id, stretch),
            worker_id=WORKER,
            position=index,
            prompt=Prompt(prompt_id=prompt_id, dataset=DATASET, content=text, columns={"answer": "w1"}),
            estimate=LengthEstimate(median=limit, upper=limit, bucket=0, predictor="constant"),
            sampling=SamplingParams(max_completion_length=limit),
            num_generations=self.workload.num_generations,
            sample_indices=tuple(range(self.workload.num_generations)),
            partition=index % PARTITIONS,
            admitted_version=FIRST,
            created_at=time.time(),
        )

    def _spent(self) -> dict[str, float]:
        """Processor seconds so far: of vLLM's processes, our thread to it, the worker's rest, rewards, broker, us."""
        process = psutil.Process(self.worker.pid)
        threads = {thread.id: thread.user_time + thread.system_time for thread in process.threads()}
        cores = _cores_of_vllm(process)
        return {
            "engine": sum(_cpu_s(core) for core in cores),
            "engine_thread": threads.pop(self.engine_thread),
            "event_loop": sum(threads.values()),
            "rewards": sum(_cpu_s(child) for child in process.children(recursive=True) if child not in cores),
            "broker": _cpu_s(psutil.Process(self.broker)),
            "client": time.process_time(),
        }


def _cores_of_vllm(worker: psutil.Process) -> list[psutil.Process]:
    """Its engine cores and ranks: the children that lead a process group, and theirs."""
    leaders = [child for child in worker.children() if os.getpgid(child.pid) == child.pid]
    return [*leaders, *(rank for leader in leaders for rank in leader.children(recursive=True))]


def _cpu_s(process: psutil.Process) -> float:
    times = process.cpu_times()
    return float(times.user + times.system)


@asynccontextmanager
async def running_pipeline(
    folder: Path, python: str, model: Path, workload: Workload, generation: str, broker: tuple[str, int]
) -> AsyncIterator[Pipeline]:
    """A worker on an embedded broker, with the model's own weights announced and adopted.

    ``generation``: its section of the settings; ``broker``: address and process.
    """
    address, broker_pid = broker
    bus = KafkaBus(KafkaSettings(bootstrap_servers=address))
    await apply_topics(address, RUN, PARTITIONS)
    tensors = load_file(model / "model.safetensors")
    sha256 = WeightExporter(folder / "weights", 1).export(
        tensors, {"config.json": (model / "config.json").read_text()}, FIRST, 0, time.time()
    )
    del tensors
    publisher = await bus.publisher("bench")
    async with open_relay(folder / "weights") as relay:
        ready = WeightsReady(
            sequence=0, sent_at=time.time(), version=FIRST, step=0, manifest_sha256=sha256, relays=(relay,)
        )
        await publisher.publish(Outgoing.of(CONTROL.full_name(RUN), ready, key="weights_ready"))
        heartbeats = await bus.subscribe([HEARTBEATS.full_name(RUN)], client_id="bench", start="latest")
        trajectories = await bus.subscribe([TRAJECTORIES.full_name(RUN)], client_id="bench", start="latest")
        worker = _start_worker(folder, python, model, workload, generation, address)
        try:
            await _until_ready(heartbeats, worker, folder / LOG)
            thread = int((folder / "engine-thread").read_text())
            yield await Pipeline.standing(
                workload=workload,
                worker=worker,
                engine_thread=thread,
                broker=broker_pid,
                publisher=publisher,
                trajectories=trajectories,
            )
        finally:
            worker.kill()
            await asyncio.to_thread(worker.wait)
            for client in (heartbeats, trajectories, publisher):
                await client.close()


def _start_worker(
    folder: Path, python: str, model: Path, workload: Workload, generation: str, address: str
) -> subprocess.Popen[bytes]:
    config = folder / "bench.toml"
    config.write_text(
        f'[run]\nname = "{RUN}"\ndirectory = "{folder}"\n[model]\npath = "{model}"\n'
        f'[kafka]\nbootstrap_servers = "{address}"\n'
        f"[loop]\nmax_prompt_length = {workload.longest_prompt}\nmax_completion_length = {workload.longest}\n"
        # No dispatcher reads it: the prompts come from here.
        f'[data]\npath = "{folder}"\n[rewards]\nfunctions = ["exact_match"]\n[generation]\n{generation}'
    )
    command = [python, "-m", "benchmarks.engine.worker", str(config), str(folder / "engine-thread")]
    with (folder / LOG).open("wb") as log:
        return subprocess.Popen(
            command, env=os.environ | ProcessPlace().environment, stdout=log, stderr=log, preexec_fn=die_with_parent
        )


async def _until_ready(heartbeats: Subscription, worker: subprocess.Popen[bytes], log: Path) -> None:
    async with asyncio.timeout(START_S):
        while worker.poll() is None:
            for record in await heartbeats.poll(timeout_s=0.2):
                heartbeat = record.message()
                if isinstance(heartbeat, Heartbeat) and heartbeat.state is WorkerState.READY:
                    return
    raise _ended(worker, log)


def _ended(worker: subprocess.Popen[bytes], log: Path) -> RuntimeError:
    return RuntimeError(f"the worker ended with {worker.returncode} before it was ready: {log.read_text()[-2000:]}")
