"""Builds the engine that the settings name; imports nothing heavy before it is asked to."""

from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

from streamrl.producers.generation.engines.length_trace import LengthTraceSettings
from streamrl.producers.generation.engines.port import Engine
from streamrl.producers.generation.settings import GenerationSettings
from streamrl.schemas.profiles import DecodeSettings
from streamrl.schemas.trajectories import SamplingParams

if TYPE_CHECKING:
    from streamrl.producers.generation.engines.port import Decoder


def build_emulated(
    settings: GenerationSettings, decode: DecodeSettings, lengths: LengthTraceSettings, time_scale: float
) -> Engine:
    """The engine that needs no model, not started yet; ``time_scale``: emulated seconds in one of the wall clock."""
    from streamrl.producers.generation.engines.emulated import EmulatedEngine

    return EmulatedEngine(
        decode,
        lengths,
        time_scale,
        settings.max_num_seqs,
        settings.max_model_len,
        recomputes=settings.adopt == "recompute",
    )


def build_engine(
    settings: GenerationSettings,
    model_path: str | Path,
    sampling: SamplingParams | None = None,
    lora_rank: int = 0,
    *,
    keeps_to_schemas: bool = False,
    transfer: str = "",
) -> Engine:
    """The engine named by ``settings.engine``, not started yet; the other arguments: see ``build_decoder``.

    Raises:
        ModelError: the engine's library is not installed.
    """
    from streamrl.producers.generation.engines.threaded import ThreadedEngine
    from streamrl.producers.generation.tokenizer import ModelTokenizer

    return ThreadedEngine(
        build_decoder(settings, model_path, sampling, lora_rank, keeps_to_schemas=keeps_to_schemas, transfer=transfer),
        settings.max_num_seqs,
        settings.chunk_tokens,
        open_tokenizer=partial(ModelTokenizer, str(model_path)),
    )


def build_decoder(
    settings: GenerationSettings,
    model_path: str | Path,
    sampling: SamplingParams | None = None,
    lora_rank: int = 0,
    *,
    keeps_to_schemas: bool = False,
    transfer: str = "",
) -> "Decoder[Any]":
    """What the engine named by ``settings.engine`` computes with, without the engine's thread; not loaded yet.

    ``sampling``: of the run. vLLM has to know when it starts whether requests will truncate the distribution, and at
    which temperature, of which rank adapters will be, whether there will be JSON schemas to keep to, and by which
    ``transfer`` a sender will put weights into it; by default they will not, and there is none.

    Raises:
        ModelError: the engine's library is not installed.
    """
    assert settings.engine != "emulated", "which build_emulated builds, of other settings"
    if settings.engine == "vllm":
        from streamrl.producers.generation.engines.vllm_decoder import VllmDecoder

        return VllmDecoder(
            str(model_path), settings, sampling, lora_rank, keeps_to_schemas=keeps_to_schemas, transfer=transfer
        )
    assert settings.engine == "transformers", "an engine of which nothing is known here"
    from streamrl.producers.generation.engines.slots import SlotDecoder

    return SlotDecoder(str(model_path), settings)
