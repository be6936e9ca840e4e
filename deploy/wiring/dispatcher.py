"""Builds the dispatcher, and the ranker that makes newer models of lengths for it."""

from functools import partial

from deploy.bus.kafka_bus import KafkaBus
from deploy.settings.tree import Settings
from producers.dispatch.dispatcher import Dispatcher
from producers.dispatch.state import TYPICAL_CURVE
from producers.generation.engines.emulated.lengths import trace_length
from producers.lengths.emulated.trace import SampleLength
from producers.lengths.predictor import build_predictor
from producers.lengths.ranker.ranker import Ranker
from producers.lengths.ranker.students import build_student
from producers.prompts.sources.source import open_source
from schemas.profiles.decode import DecodeCurve, DecodeSettings
from schemas.profiles.profile import DeviceProfile


def build_dispatcher(settings: Settings, _worker_id: str) -> Dispatcher:
    """The dispatcher over the prompts that the settings name.

    Raises:
        DataError: there are no such prompts.
    """
    return Dispatcher(
        bus=KafkaBus(settings.kafka),
        run_name=settings.run.name,
        loop=settings.loop,
        settings=settings.dispatch,
        source=open_source(settings.data, run_seed=settings.run.seed),
        predictor=build_predictor(settings.lengths, settings.loop, _trace(settings)),
        seed=_sampling_seed(settings),
        curve=decode_curve(settings),
    )


def decode_curve(settings: Settings) -> DecodeCurve:
    """A worker's decode steps in seconds of the wall clock: as measured, as emulated, or typical ones.

    Raises:
        SettingsError: the profile cannot be read.
    """
    is_emulated, profile = settings.generation.engine == "emulated", settings.dispatch.profile
    if profile is None and not is_emulated:
        return TYPICAL_CURVE
    decode = DeviceProfile.read(profile).decode if profile is not None else settings.emulation.decode
    return DecodeCurve(_faster(decode, settings.emulation.time_scale) if is_emulated else decode)


def _faster(decode: DecodeSettings, factor: float) -> DecodeSettings:
    return decode.model_copy(
        update={
            "step_s": decode.step_s / factor,
            "table": tuple((batch, seconds / factor) for batch, seconds in decode.table),
            "context_s_per_token": decode.context_s_per_token / factor,
            "prefill_s_per_token": decode.prefill_s_per_token / factor,
            "adopt_s": decode.adopt_s / factor,
        }
    )


def build_ranker(settings: Settings, _worker_id: str) -> Ranker:
    """The ranker of the run's predictor.

    Raises:
        SettingsError: the predictor has no model that could be made.
    """
    return Ranker(KafkaBus(settings.kafka), settings.run.name, build_student(settings.lengths, settings.loop))


def _trace(settings: Settings) -> SampleLength | None:
    """The lengths that emulated workers will produce."""
    return partial(trace_length, settings.emulation.lengths) if settings.generation.engine == "emulated" else None


def _sampling_seed(settings: Settings) -> int | None:
    """None for vLLM, which draws seeded requests one by one; our own engine draws all rows at once in any case."""
    return settings.run.seed if settings.generation.engine == "transformers" else None
