"""Builds the engine that the settings name; imports nothing heavy before it is asked to."""

from pathlib import Path

from producers.generation.settings import GenerationSettings
from schemas.ports.engine import Engine


def build_engine(settings: GenerationSettings, model_path: str | Path) -> Engine:
    """The engine named by ``settings.engine``, not started yet.

    Raises:
        ModelError: the engine's library is not installed.
    """
    from producers.generation.engines.threaded import ThreadedEngine

    if settings.engine == "vllm":
        from producers.generation.engines.vllm_decoder import VllmDecoder

        return ThreadedEngine(VllmDecoder(str(model_path), settings), settings.max_num_seqs, settings.chunk_tokens)
    from producers.generation.engines.slots.decoder import SlotDecoder

    return ThreadedEngine(SlotDecoder(str(model_path), settings), settings.max_num_seqs, settings.chunk_tokens)
