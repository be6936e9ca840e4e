"""`streamrl profile`: measures this machine, fits the profile, and shows both as text."""

import asyncio
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from streamrl.inspection.environment import device_name, library_versions
from streamrl.planning.fitting import Fitted, fit_decode, fit_prefill, fit_training
from streamrl.planning.measuring import (
    DecodeMeter,
    TrainMeter,
    TransferPoint,
    endless_model,
    measure_transfer,
    open_relay,
)
from streamrl.planning.sharing import RunCosts, SharingMeter, run_costs
from streamrl.producers.generation.engines.factory import build_decoder
from streamrl.producers.generation.engines.port import Decoder
from streamrl.schemas.control import WeightsReady
from streamrl.schemas.errors import StreamRLError
from streamrl.schemas.identifiers import PolicyVersion
from streamrl.schemas.profiles import CoreCosts, DecodeSettings, DeviceProfile, TrainingCosts
from streamrl.settings.tree import Settings

# The points to measure: batch sizes, context lengths, prompts, micro-batches. Pure.

SHORTEST = 8


@dataclass(frozen=True)
class Effort:
    """How much to measure: timed decode steps and training steps per point, and the number of lengths of each kind."""

    decode_steps: int
    repeats: int
    levels: int


THOROUGH, QUICK = Effort(24, 3, 4), Effort(8, 1, 2)


def batches(max_num_seqs: int) -> list[int]:
    """The batch sizes to measure: 1, 2, 4, … and the largest."""
    doubled = [1 << power for power in range(max_num_seqs.bit_length()) if 1 << power < max_num_seqs]
    return [*doubled, max_num_seqs]


def levels(shortest: int, longest: int, number: int) -> list[int]:
    """``number`` lengths from the shortest to the longest, each the same multiple of the one before."""
    if longest <= shortest or number < 2:
        return [max(1, min(shortest, longest))]
    # longest = shortest * factor ** (number - 1); rounding may make two short lengths equal.
    factor = (longest / shortest) ** (1 / (number - 1))
    return sorted({round(shortest * factor**power) for power in range(number)})


def contexts(settings: Settings, longest: int, effort: Effort) -> list[int]:
    """Prompt lengths to measure as contexts, up to the longest of the run or of the model."""
    reached = settings.loop.max_prompt_length + settings.loop.max_completion_length
    return levels(SHORTEST, min(longest, reached), effort.levels)


def prompts(settings: Settings, longest: int, effort: Effort) -> list[int]:
    """Prompt lengths for prefills, only long ones: a short prompt costs little in any case."""
    longest = min(longest, settings.loop.max_prompt_length)
    return levels(max(SHORTEST, longest // 8), longest, effort.levels)


def sequences(settings: Settings, positions: int, effort: Effort) -> Sequence[int]:
    """Sequence lengths for micro-batches, up to the token budget."""
    reached = settings.loop.max_prompt_length + settings.loop.max_completion_length
    return levels(2 * SHORTEST, min(positions, reached, settings.batching.token_budget), effort.levels)


def largest_micro_batch(settings: Settings) -> int:
    """Most tokens of a micro-batch: the budget, or all of a step's."""
    loop = settings.loop
    longest = loop.max_prompt_length + loop.max_completion_length
    return min(settings.batching.token_budget, loop.groups_per_step * loop.num_generations * longest)


# The measurement: training, weight transfer, decoding, one after the other, so that each has the device alone.

Progress = Callable[[str], None]
PROMPTS_AT_ONCE = (1,)
"""Numbers of prompts per prefill: one, since the slots of a running batch become free one by one."""


@dataclass(frozen=True)
class Profiled:
    """The profile, and every measurement with its fit."""

    profile: DeviceProfile
    fitted: tuple[Fitted, ...]


@dataclass(frozen=True)
class _Trained:
    costs: TrainingCosts
    fitted: list[Fitted]
    versions: list[WeightsReady]
    sharing: SharingMeter


def profile(settings: Settings, effort: Effort, progress: Progress) -> Profiled:
    """Measure the settings' model and engine on this machine; for an emulated run, return the settings' own costs.

    Raises:
        ModelError: the model or the engine's library is missing, or does not fit the device.
    """
    emulation = settings.emulation
    if settings.generation.engine == "emulated":
        return Profiled(_profile(settings, emulation.decode, emulation.training, 0.0), ())
    with tempfile.TemporaryDirectory(prefix="streamrl-profile-") as scratch:
        return _measured(settings, effort, Path(scratch), progress)


def _measured(settings: Settings, effort: Effort, scratch: Path, progress: Progress) -> Profiled:
    progress("measuring micro-batches, optimizer steps and exports")
    trained = asyncio.run(_train(settings, effort, scratch))
    progress(f"loading {settings.model.path} into {settings.generation.engine}")
    with _decoder(settings, scratch) as meter_of:
        meter = meter_of(effort.decode_steps)
        # Into an empty decoder, so that ``adopt_s`` is the time of the weights alone.
        progress("measuring weight transfer")
        transfers = asyncio.run(_transfer(trained.versions, scratch, meter.decoder))
        progress("measuring prefills and decode steps")
        longest = meter.longest_context()
        prefills = list(meter.prefills_at(prompts(settings, longest, effort), PROMPTS_AT_ONCE))
        sizes = batches(settings.generation.max_num_seqs)
        reached = contexts(settings, longest, effort)
        steps = list(meter.steps_at(sizes, reached))
        sharing = SharingMeter()
        meter.share(sizes[-1], reached[len(reached) // 2], sharing)
        kv_tokens = meter.decoder.kv_tokens  # known only while the decoder is loaded
    curve, decode_fits = fit_decode(steps)
    prefill_s, prefill_s_per_token, prefill_fits = fit_prefill(prefills)
    # Medians, so that one slow transfer of the three does not count.
    adopt_s = sorted(point.adopt_s for point in transfers)[len(transfers) // 2]
    transfer_s = sorted(point.total_s for point in transfers)[len(transfers) // 2]
    decode = DecodeSettings(
        table=curve.table,
        context_s_per_token=curve.context_s_per_token,
        padding_counts=curve.padding_counts,
        prefill_s=prefill_s,
        prefill_s_per_token=prefill_s_per_token,
        adopt_s=adopt_s,
        kv_tokens=kv_tokens,
    )
    fitted = (*decode_fits, *prefill_fits, *trained.fitted)
    found = _profile(settings, decode, trained.costs, transfer_s)
    if device_name(settings.generation.device) == device_name("cpu"):
        progress("measuring what a run costs beside decoding and training")
        cores = _core_costs(settings, found, (sharing, trained.sharing), scratch, progress)
        found = found.model_copy(update={"cores": cores})
    return Profiled(found, fitted)


def _core_costs(
    settings: Settings,
    measured: DeviceProfile,
    sharing: tuple[SharingMeter, SharingMeter],
    scratch: Path,
    progress: Progress,
) -> CoreCosts:
    """``sharing``: of the engine and of the trainer."""
    engine, trainer = sharing
    emulated = settings.emulation.model_copy(update={"decode": measured.decode, "training": measured.training})
    try:
        costs = run_costs(settings.model_copy(update={"emulation": emulated}), scratch)
    except StreamRLError as error:  # no Java, for example
        progress(f"cannot measure a run, so its other processes count as free: {error}")
        costs = RunCosts(0.0, 0.0)
    # Python runs one thread of a process at a time. vLLM computes in a process of its own.
    worker_s = costs.worker_cpu_s_per_trajectory if settings.generation.engine == "transformers" else 0.0
    return CoreCosts(
        number=engine.cores,
        full_speed=(engine.full_speed * trainer.full_speed) ** 0.5,
        engine_cores=engine.used,
        trainer_cores=trainer.used,
        cpu_s_per_trajectory=costs.cpu_s_per_trajectory - worker_s,
        worker_s_per_trajectory=worker_s,
        cores_per_run=costs.cores_per_run,
    )


def _profile(settings: Settings, decode: DecodeSettings, training: TrainingCosts, transfer_s: float) -> DeviceProfile:
    emulated = settings.generation.engine == "emulated"
    return DeviceProfile(
        device="emulated" if emulated else device_name(settings.generation.device),
        model=settings.model.path or "none",
        engine=settings.generation.engine,
        max_num_seqs=settings.generation.max_num_seqs,
        decode=decode,
        training=training,
        weight_transfer_s=transfer_s,
        created_at=time.time(),
        versions={} if emulated else library_versions(),
    )


async def _train(settings: Settings, effort: Effort, scratch: Path) -> _Trained:
    """Measure training, and export three versions for the transfers. The policy is freed at the end."""
    # Imported here: they load torch, which an emulated run's profile does not need.
    from streamrl.consumers.training.checkpoints.storage import open_storage
    from streamrl.consumers.training.policy import ComputeThread, PolicyPaths, TrainedPolicy

    compute = ComputeThread(settings.training.threads)
    places = PolicyPaths(settings.model.path, open_storage(scratch / "checkpoints", scratch), scratch / "weights")
    limit = settings.loop.max_completion_length
    try:
        training = settings.training.model_copy(
            update={"max_grad_norm": 1e9}
        )  # else a step of made-up samples is refused
        policy = await compute(TrainedPolicy, places, settings.algorithm, training, limit, None, 0)
        meter = TrainMeter(policy, compute, effort.repeats)
        lengths, sharing = sequences(settings, policy.limits.positions, effort), SharingMeter()
        budget = largest_micro_batch(settings)
        measured = await meter.steps_at(lengths, budget)
        await meter.share(lengths, budget, sharing)
        versions, seconds = [], []
        for number in (1, 2, 3):
            version = PolicyVersion(1, number)
            sha256, export_s = await meter.export(version)
            seconds.append(export_s)
            versions.append(
                WeightsReady(
                    sequence=number, sent_at=0.0, version=version, step=number, manifest_sha256=sha256, relays=()
                )
            )
    finally:
        compute.close()  # waits for a call under way, so that nothing computes at the same time as the decoder
    costs, fitted = fit_training(measured)
    # [1]: the median of three exports.
    return _Trained(costs.model_copy(update={"export_s": sorted(seconds)[1]}), fitted, versions, sharing)


async def _transfer(versions: list[WeightsReady], scratch: Path, decoder: Decoder[Any]) -> list[TransferPoint]:
    async with open_relay(scratch / "weights") as address:
        announced = [ready.replace(relays=(address,)) for ready in versions]
        return [await measure_transfer(ready, scratch / "fetched", decoder) for ready in announced]


@contextmanager
def _decoder(settings: Settings, scratch: Path) -> Iterator[Callable[[int], DecodeMeter]]:
    # Endless: if the model ended a completion, the batch would be smaller than the point claims.
    model = endless_model(settings.model.path, scratch / "model")
    decoder = build_decoder(settings.generation, model)
    facts = decoder.load()
    try:
        yield lambda steps: DecodeMeter(decoder, facts, steps)
    finally:
        decoder.close()


def lines(profiled: Profiled) -> Iterator[str]:
    """The lines for the terminal."""
    profile = profiled.profile
    yield f"{profile.engine} with {profile.model} on {profile.device}"
    yield from _fits(profiled.fitted)
    yield from _summary(profile)


def _fits(fitted: Sequence[Fitted]) -> Iterator[str]:
    if not fitted:
        return
    width = max(len(one.what) for one in fitted)
    yield f"{'':{width}}  {'measured':>11}  {'fitted':>11}  {'error':>7}"
    for one in fitted:
        yield f"{one.what:{width}}  {_ms(one.measured_s)}  {_ms(one.fitted_s)}  {one.error:7.1%}"


def _summary(profile: DeviceProfile) -> Iterator[str]:
    decode, training = profile.decode, profile.training
    if decode.table:
        yield "decode step by batch: " + ", ".join(f"{batch}: {1e3 * value:.2f} ms" for batch, value in decode.table)
    else:
        yield f"decode step: {1e3 * decode.step_s:.2f} ms x (1 + batch / {decode.batch_scale:g})"
    counted = "token, padding included" if decode.padding_counts else "token"
    yield (
        f"context {1e9 * decode.context_s_per_token:.2f} ns per {counted}, prefill {1e3 * decode.prefill_s:.2f} ms + "
        f"{1e6 * decode.prefill_s_per_token:.2f} us per token, adoption {1e3 * decode.adopt_s:.1f} ms"
    )
    yield (
        f"training {1e6 * training.forward_backward_s_per_token:.2f} us per token + "
        f"{1e9 * training.forward_backward_s_per_squared_token:.3f} ns per squared token + "
        f"{1e3 * training.forward_backward_s_per_micro_batch:.2f} ms per micro-batch, optimizer "
        f"{1e3 * training.optimizer_step_s:.2f} ms, export {1e3 * training.export_s:.1f} ms"
    )
    yield f"weights from store to engine {1e3 * profile.weight_transfer_s:.1f} ms"
    if (cores := profile.cores) is not None:
        yield (
            f"{cores.number:g} cores, speed {cores.full_speed:.0%} if all are busy; engine {cores.engine_cores:.2f}, "
            f"trainer {cores.trainer_cores:.2f}, others {cores.cores_per_run:.2f} + "
            f"{1e3 * cores.cpu_s_per_trajectory:.2f} ms per trajectory, of a worker's engine "
            f"{1e3 * cores.worker_s_per_trajectory:.2f} ms"
        )


def _ms(seconds: float) -> str:
    return f"{1e3 * seconds:8.3f} ms"
