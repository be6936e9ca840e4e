"""`streamrl profile`: training, weight transfer, decoding, one after the other, so that each has the device alone."""

import asyncio
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from deploy.profiling import points
from deploy.profiling.device import device_name, library_versions
from deploy.profiling.fitting import Fitted, fit_decode, fit_prefill, fit_training
from deploy.profiling.measuring.decoding import DecodeMeter
from deploy.profiling.measuring.endless import endless_model
from deploy.profiling.measuring.training import TrainMeter
from deploy.profiling.measuring.transfer import TransferPoint, relay_of, transferred
from deploy.settings.tree import Settings
from producers.generation.engines.choice import build_decoder
from producers.generation.engines.decoder import Decoder
from schemas.identifiers import PolicyVersion
from schemas.messages.control import WeightsReady
from schemas.profiles.decode import DecodeSettings
from schemas.profiles.profile import DeviceProfile
from schemas.profiles.training import TrainingCosts

Progress = Callable[[str], None]
PROMPTS_AT_ONCE = (1,)
"""In a running batch slots become free one by one."""


@dataclass(frozen=True)
class Profiled:
    """The profile, and every measurement beside its fit."""

    profile: DeviceProfile
    fitted: tuple[Fitted, ...]


@dataclass(frozen=True)
class _Trained:
    costs: TrainingCosts
    fitted: list[Fitted]
    versions: list[WeightsReady]


def profile(settings: Settings, effort: points.Effort, progress: Progress) -> Profiled:
    """Measure what the settings name on this machine; of an emulated run, what it was told.

    Raises:
        ModelError: the model or the engine's library is not there, or does not fit the device.
    """
    emulation = settings.emulation
    if settings.generation.engine == "emulated":
        return Profiled(_profile(settings, emulation.decode, emulation.training, 0.0), ())
    with tempfile.TemporaryDirectory(prefix="streamrl-profile-") as scratch:
        return _measured(settings, effort, Path(scratch), progress)


def _measured(settings: Settings, effort: points.Effort, scratch: Path, progress: Progress) -> Profiled:
    progress("measuring micro-batches, optimizer steps and exports")
    trained = asyncio.run(_train(settings, effort, scratch))
    progress(f"loading {settings.model.path} into {settings.generation.engine}")
    with _decoder(settings, scratch) as meter_of:
        meter = meter_of(effort.decode_steps)
        progress("measuring weight transfer")
        transfers = asyncio.run(_transfer(trained.versions, scratch, meter.decoder))
        progress("measuring prefills and decode steps")
        longest = meter.longest_context()
        prefills = list(meter.prefills_at(points.prompts(settings, longest, effort), PROMPTS_AT_ONCE))
        batches = points.batches(settings.generation.max_num_seqs)
        steps = list(meter.steps_at(batches, points.contexts(settings, longest, effort)))
    table, context_s, decode_fits = fit_decode(steps)
    prefill_s, prefill_fits = fit_prefill(prefills)
    adopt_s = sorted(point.adopt_s for point in transfers)[len(transfers) // 2]
    transfer_s = sorted(point.total_s for point in transfers)[len(transfers) // 2]
    decode = DecodeSettings(table=table, context_s_per_token=context_s, prefill_s_per_token=prefill_s, adopt_s=adopt_s)
    fitted = (*decode_fits, *prefill_fits, *trained.fitted)
    return Profiled(_profile(settings, decode, trained.costs, transfer_s), fitted)


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


async def _train(settings: Settings, effort: points.Effort, scratch: Path) -> _Trained:
    """Three versions are exported, for the transfers; the policy is gone afterwards."""
    from consumers.training.compute import ComputeThread
    from consumers.training.persistence.locations import open_location
    from consumers.training.policy import PolicyPlaces, TrainedPolicy

    compute = ComputeThread(settings.training.threads)
    places = PolicyPlaces(settings.model.path, open_location(scratch / "checkpoints", scratch), scratch / "weights")
    limit = settings.loop.max_completion_length
    try:
        training = settings.training.model_copy(update={"grad_norm_spike": 0.0})  # made-up samples may jump
        policy = await compute(TrainedPolicy, places, settings.algorithm, training, limit, None, 0)
        meter = TrainMeter(policy, compute, effort.repeats)
        lengths = points.sequences(settings, policy.limits.positions, effort)
        measured = await meter.steps_at(lengths, settings.batching.token_budget)
        versions, seconds = [], []
        for number in (1, 2, 3):
            version = PolicyVersion(1, number)
            sha256, took = await meter.export(version)
            seconds.append(took)
            versions.append(
                WeightsReady(
                    sequence=number, sent_at=0.0, version=version, step=number, manifest_sha256=sha256, relays=()
                )
            )
    finally:
        compute.close()
    costs, fitted = fit_training(measured)
    return _Trained(costs.model_copy(update={"export_s": sorted(seconds)[1]}), fitted, versions)


async def _transfer(versions: list[WeightsReady], scratch: Path, decoder: Decoder[Any]) -> list[TransferPoint]:
    async with relay_of(scratch / "weights") as address:
        announced = [ready.replace(relays=(address,)) for ready in versions]
        return [await transferred(ready, scratch / "fetched", decoder) for ready in announced]


@contextmanager
def _decoder(settings: Settings, scratch: Path) -> Iterator[Callable[[int], DecodeMeter]]:
    model = endless_model(settings.model.path, scratch / "model")
    decoder = build_decoder(settings.generation, model)
    facts = decoder.load()
    try:
        yield lambda steps: DecodeMeter(decoder, facts, steps)
    finally:
        decoder.close()
