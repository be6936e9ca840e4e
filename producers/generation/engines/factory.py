"""Builds the engine that the settings name. Heavy libraries are imported only when an engine is built."""

from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

from streamrl.producers.generation.engines.length_trace import LengthTraceSettings
from streamrl.producers.generation.engines.port import Engine
from streamrl.producers.generation.pace import CHUNK_TOKENS
from streamrl.producers.generation.settings import GenerationSettings
from streamrl.schemas.profiles import DecodeSettings
from streamrl.schemas.trajectories import SamplingParams

if TYPE_CHECKING:
    from streamrl.producers.generation.engines.port import Decoder


def build_emulated(
    settings: GenerationSettings, decode: DecodeSettings, lengths: LengthTraceSettings, time_scale: float
) -> Engine:
    """The emulated engine, not started yet. ``time_scale``: emulated seconds per second of the wall clock."""
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
    chunk_tokens: int = CHUNK_TOKENS,
) -> Engine:
    """The engine that ``settings.engine`` names, not started yet. For the arguments see ``build_decoder``.

    ``chunk_tokens``: tokens of a completion that it hands over at once.

    Raises:
        ModelError: the engine's library is not installed.
    """
    from streamrl.producers.generation.engines.threaded import ThreadedEngine
    from streamrl.producers.generation.tokenizer import ModelTokenizer

    return ThreadedEngine(
        build_decoder(settings, model_path, sampling, lora_rank, keeps_to_schemas=keeps_to_schemas, transfer=transfer),
        settings.max_num_seqs,
        chunk_tokens,
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
    """The decoder of the engine that ``settings.engine`` names, without the engine's thread and not loaded yet.

    vLLM needs the other arguments when it starts. ``sampling``: the run's sampling parameters, for truncation and
    temperature; None: requests do not truncate. ``lora_rank``: rank of adapters; 0: there are none.
    ``keeps_to_schemas``: whether requests may have JSON schemas. ``transfer``: the backend by which a sender puts
    weights into it; empty: there is no sender.

    Raises:
        ModelError: the engine's library is not installed.
    """
    assert settings.engine != "emulated", "``build_emulated`` builds that, from other settings"
    if settings.engine == "vllm":
        from streamrl.producers.generation.engines.vllm_decoder import VllmDecoder

        return VllmDecoder(
            str(model_path), settings, sampling, lora_rank, keeps_to_schemas=keeps_to_schemas, transfer=transfer
        )
    assert settings.engine == "transformers", "there is no other engine"
    from streamrl.producers.generation.engines.slots import SlotDecoder

    return SlotDecoder(str(model_path), settings)
