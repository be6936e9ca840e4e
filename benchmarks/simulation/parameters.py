"""Plants and systems of the published experiments, from ``parameters.json``, where each number has its source or is
marked as fitted.

A decode step of b completions with C tokens in their caches takes, in a replica of tp GPUs,

    factor × (base + s × b) + factor × C × kv_bytes / (tp × bandwidth)

where base and s come from Laminar's figure 4, whose slope at 4,096 tokens of context is s + 4096 × the reading of as
many tokens. Training a step of W tokens on G GPUs takes W × cost(model) / G, and more by the form that was chosen.
"""

import json
from dataclasses import dataclass, replace
from functools import cache
from pathlib import Path
from typing import Any

from benchmarks.simulation.papers import (
    LAMINAR_LENGTHS,
    SANDBOX_MS,
    STREAMRL_FACTORS,
    STREAMRL_LENGTHS,
    STREAMRL_PROMPTS,
    TOOL_LENGTHS,
    LaminarRow,
    StreamRow,
)
from benchmarks.simulation.plant import Lengths, Plant, System, Tools, Workload
from streamrl.schemas.identifiers import PolicyVersion
from streamrl.schemas.profiles import DecodeCurve, DecodeSettings
from streamrl.weights.relay.chain import RelayMember, chain_of, upstreams

FILE = Path(__file__).with_name("parameters.json")
ALL_SLOTS = 8192
GPUS_PER_HOST = 8


@cache
def _file() -> dict[str, Any]:
    found: dict[str, Any] = json.loads(FILE.read_text())
    return found


def known(name: str) -> Any:
    """A parameter's value."""
    return _file()["known"][name]["value"]


def fitted(paper: str) -> dict[str, Any]:
    """What was fitted on a paper's throughputs, or on its details, by name."""
    return {name: entry["value"] for name, entry in _file()["fitted"][paper].items()}


def detail(name: str) -> Any:
    """A parameter that was fitted on a detail of a paper."""
    return fitted("details")[name]


@dataclass(frozen=True)
class Device:
    """Beside an H800, of which decode steps are published: how much faster, and how much it holds."""

    flops: float = 1.0
    memory_bytes_per_s: float = 1.0
    memory_bytes: float = 1.0


H800 = Device()


def h20() -> Device:
    """What generates in StreamRL's other place."""
    names = ("flops", "memory_bytes_per_s", "memory_bytes")
    return Device(**{name: known(f"h20_{name}") / known(name) for name in names})


def decode_curve(model: str, gpus: int, factor: float = 1.0, device: Device = H800) -> DecodeCurve:
    """Of a replica of so many GPUs; 72B, of which nothing is published, from 32B's by the ratio of the weights.

    Another device reads weights and caches by its memory, and computes what a completion adds by its operations.
    """
    weights = known("parameters")
    figure = known("decode_step")
    context_s = known("kv_bytes_per_token")[model] / gpus / known("memory_bytes_per_s") / device.memory_bytes_per_s
    like = "32B" if model == "72B" else model
    base_s, slope_s = figure[like][str(gpus)]
    sample_s = slope_s - 4096 * known("kv_bytes_per_token")[like] / gpus / known("memory_bytes_per_s")
    ratio = weights[model] / weights[like]
    base_s, sample_s = base_s * ratio / device.memory_bytes_per_s, sample_s * ratio / device.flops
    prefill_s = 2 * weights[model] / (gpus * known("flops") * device.flops * known("prefill_share_of_flops"))
    return DecodeCurve(
        DecodeSettings(
            step_s=base_s * factor,
            batch_scale=base_s / sample_s,
            context_s_per_token=context_s * factor,
            prefill_s_per_token=prefill_s * factor,
        )
    )


def kv_tokens(model: str, gpus: int, device: Device = H800) -> int:
    """What the cache of a replica holds: memory that the engine takes, less the weights."""
    memory = known("memory_bytes") * device.memory_bytes * known("memory_share") * gpus - 2 * known("parameters")[model]
    return int(memory / known("kv_bytes_per_token")[model])


def weight_bytes(model: str) -> float:
    """In two bytes a parameter."""
    return 2.0 * float(known("parameters")[model])


def arrivals(model: str, replicas: int, gpus: int) -> list[float]:
    """Seconds until each replica's host has a new version, down the product's chain of relays, then its own pull.

    A chunk goes on as soon as it has come: hop h has the whole after size / bandwidth × (1 + h / chunks).
    """
    hosts = max(1, -(-replicas * gpus // GPUS_PER_HOST))
    members = [RelayMember(f"relay-{host:05}", "", has_store=not host) for host in range(hosts + 1)]
    chain = chain_of(members)
    version = PolicyVersion(1, 1)
    hops = {chain[0].relay_id: 0}
    for member in chain[1:]:
        # Whom a relay asks first; so the hops are what the planner says, not what a chain should be.
        hops[member.relay_id] = hops[upstreams(member.relay_id, chain, version)[0].relay_id] + 1
    once_s = weight_bytes(model) / detail("relay_bytes_per_s")
    by_host = [once_s * (1 + hops[f"relay-{host + 1:05}"] / detail("relay_chunks")) for host in range(hosts)]
    return [by_host[replica * gpus // GPUS_PER_HOST] for replica in range(replicas)]


def _transfers(model: str, replicas: int, gpus: int) -> dict[str, Any]:
    size = weight_bytes(model)
    return {
        "arrivals_s": arrivals(model, replicas, gpus),
        "sync_s": size / detail("global_sync_bytes_per_s"),
        "stall_s": size / detail("actor_bytes_per_s"),
        "adopt_s": size / detail("pull_bytes_per_s"),
    }


def train_s(paper: str, model: str, gpus: int, values: dict[str, float]) -> tuple[float, float]:
    """Seconds of the whole trainer: for a token, and beside that for a step."""
    relative = known("parameters")[model] / known("parameters")["7B"]
    cost = values["train_gpu_s_per_token"] * relative ** values["train_exponent"]
    shared = cost / gpus ** values.get("train_scaling", 1.0)
    serial = values.get("train_serial_s_per_token", 0.0) * relative ** values.get("train_serial_exponent", 0.0)
    return shared + serial, values.get("train_s_per_step", 0.0)


_RANKER = {
    "known": "ranker",
    "score_error": tuple(detail("ranker_score_error")),
    "log_error": known("ranker_log_error"),
}
UNBOUND = 1000
"""Steps of staleness: Laminar has no bound, and AReaL ran without one there."""
LAMINAR_SYSTEMS = {
    "verl": System("synchronous, colocated", "synchronous", "plan", colocated=True),
    "one_step": System("one-step", "one_step_async", "plan"),
    "stream": System("stream generation", "one_step_async", "plan", trains="stream"),
    "areal": System(
        "partial rollout", "trajectory_async", "scheduler", "least_loaded", adoption="computed", trains="stream",
        max_staleness=UNBOUND,
    ),
    "laminar": System(
        "own batches and repack", "trajectory_async", "batches", adoption="batch", trains="stream",
        repack=True, tail_limit=known("tail_limit"), repack_every_s=known("repack_every_s"), full=known("cache_full"),
        payback=0.0, max_staleness=UNBOUND,
    ),
    "laminar_without_repack": System(
        "own batches", "trajectory_async", "batches", adoption="batch", trains="stream", max_staleness=UNBOUND,
    ),
    "synchronous": System("synchronous, disaggregated", "synchronous", "plan"),
    "streamrl_ranker_repack": System(
        "trajectory_async, ranker, repack", "trajectory_async", "scheduler", "lpt", adoption="idle", trains="stream",
        repack=True, full=known("cache_full"), **_RANKER,
    ),
}  # fmt: skip
VERL_BASED = ("verl", "one_step", "stream", "synchronous")
STREAMRL_SYSTEMS = {
    "verl": System("synchronous, colocated", "synchronous", "plan", colocated=True),
    "colocation": System("synchronous, colocated", "synchronous", "plan", colocated=True),
    "skewness": System("colocated, skewness-aware", "synchronous", "plan", "skewness_aware", **_RANKER),
    "sync": System("stream", "stream", "plan", "skewness_aware", trains="stream", **_RANKER),
    "async": System(
        "one_step_async", "one_step_async", "scheduler", "skewness_aware", adoption="kept", trains="stream",
        **_RANKER,
    ),
    "synchronous": System("synchronous, disaggregated", "synchronous", "plan"),
}  # fmt: skip


def decode_factor(name: str, gpus: int, values: dict[str, float]) -> float:
    """By how much a Laminar system's decode steps are longer than those of figure 4, on replicas of so many GPUs.

    verl, what was built on it and Laminar sample with vLLM, AReaL with an SGLang of its own.
    """
    if name == "areal":
        return values.get("decode_factor_areal", 1.0)
    found = values.get("decode_factor_vllm", 1.0)
    if gpus > 1:
        found *= values.get("decode_factor_parallel", 1.0)
    return found * (values.get("decode_factor_verl", 1.0) if name in VERL_BASED else 1.0)


def laminar(row: LaminarRow, name: str, values: dict[str, float] | None = None) -> tuple[Plant, Workload, System]:
    """A configuration of Laminar's figure 11; ``areal`` with a bound of k: ``areal, k = 1``."""
    values = fitted("laminar") if values is None else values
    name, _, bound = name.partition(", k = ")
    system = LAMINAR_SYSTEMS[name]
    if bound:
        system = replace(system, max_staleness=int(bound))
    training, generating = row.split(name)
    is_verl = name in VERL_BASED
    gpus = known("replica_gpus_baselines" if is_verl else "replica_gpus")[row.model]
    replicas = generating // gpus
    per_token, per_step = train_s("laminar", row.model, training, values)
    plant = Plant(
        replicas=replicas,
        curve=decode_curve(row.model, gpus, decode_factor(name, gpus, values)),
        slots=ALL_SLOTS if is_verl else known("concurrency"),
        kv_tokens=kv_tokens(row.model, gpus),
        train_s_per_token=per_token + (values.get("control_in_training_s_per_token", 0.0) if is_verl else 0.0),
        train_s_per_step=per_step + (values.get("areal_s_per_step", 0.0) if name == "areal" else 0.0),
        control_s_per_token=values.get("control_s_per_token", 0.0) if is_verl else 0.0,
        **_transfers(row.model, replicas, gpus),
    )
    if system.colocated:
        plant = replace(plant, sync_s=0.0, stall_s=0.0)
    prompt = known("laminar_prompt_tokens")
    prompts = Lengths(((prompt - 1, 1.0),), prompt + 1)
    return plant, Workload(512, 16, LAMINAR_LENGTHS[row.model], prompts, 16_384), system


def tool_calling(plant: Plant, work: Workload) -> tuple[Plant, Workload]:
    """The same with the tasks of Laminar's figure 12, whose completions call tools."""
    tools = Tools(known("tool_calls_mean"), known("tool_calls_most"), SANDBOX_MS, 1000.0)
    return plant, replace(work, lengths=TOOL_LENGTHS, tools=tools)


def streamrl(row: StreamRow, name: str, values: dict[str, float] | None = None) -> tuple[Plant, Workload, System]:
    """A configuration of StreamRL's figure 8; ``skewness``: of its table 3."""
    values = fitted("streamrl") if values is None else values
    system = STREAMRL_SYSTEMS[name]
    is_colocated = system.colocated or name == "skewness"
    gpus = known("replica_gpus_streamrl")[row.model]
    generating = row.gpus if is_colocated else row.generating
    training = row.gpus if is_colocated else row.gpus - row.generating
    replicas = generating // gpus
    per_token, per_step = train_s("streamrl", row.model, training, values)
    factor = values.get("train_factor_verl", 1.0) if name == "verl" else 1.0
    factor *= values.get("train_factor_colocated", 1.0) if is_colocated else 1.0
    plant = Plant(
        replicas=replicas,
        curve=decode_curve(row.model, gpus, values.get("decode_factor_own", 1.0)),
        slots=detail("concurrency_streamrl"),
        kv_tokens=kv_tokens(row.model, gpus),
        train_s_per_token=per_token * factor,
        train_s_per_step=per_step + (values.get("switch_s", 0.0) if is_colocated else 0.0),
        **_transfers(row.model, replicas, gpus),
    )
    if is_colocated:
        plant = replace(plant, sync_s=0.0, stall_s=0.0)
    lengths = replace(STREAMRL_LENGTHS, factor=STREAMRL_FACTORS[row.lengths])
    return plant, Workload(1024, 1, lengths, STREAMRL_PROMPTS, 20_000), system


def across(row: StreamRow, training: int) -> tuple[Plant, Workload, System]:
    """StreamRL's figure 12: as many H20 generate as there were H800, in another place, behind a slower link."""
    plant, work, system = streamrl(replace(row, gpus=row.gpus + training, generating=row.gpus), "async")
    gpus = known("replica_gpus_streamrl")[row.model]
    link_s = weight_bytes(row.model) / known("link_bytes_per_s")
    # One machine receives over the link, and passes a chunk on as soon as it has come.
    arrivals_s = [link_s + at - weight_bytes(row.model) / detail("relay_bytes_per_s") for at in plant.arrivals_s]
    curve, cache = decode_curve(row.model, gpus, device=h20()), kv_tokens(row.model, gpus, h20())
    return replace(plant, curve=curve, kv_tokens=cache, arrivals_s=arrivals_s), work, system
