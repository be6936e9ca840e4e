"""vLLM's tool parsers, by name, for the text of complete completions. A gateway uses them without vLLM's engine."""

import importlib.util
from collections.abc import Callable
from typing import Any

from streamrl.producers.generation.tokenizer import ModelTokenizer
from streamrl.schemas.errors import SettingsError

ExtractToolCalls = Callable[[str, list[dict[str, Any]]], tuple[str, list[tuple[str, str]]]]
"""Takes a text and the tools as in OpenAI's API. Returns the text without calls, and each call's name and arguments."""


def vllm_tool_parser(name: str, tokenizer: ModelTokenizer) -> ExtractToolCalls:
    """The tool parser of vLLM's with that name.

    Raises:
        SettingsError: vLLM is not installed, or has no parser of that name.
    """
    if importlib.util.find_spec("vllm") is None:
        raise SettingsError(
            f"expected gateway.tool_parser hermes or json, since vLLM is not installed, got {name}; install vLLM for "
            "its parsers"
        )
    from vllm.entrypoints.openai.chat_completion.protocol import ChatCompletionRequest
    from vllm.tool_parsers import ToolParserManager

    try:
        parser = ToolParserManager.get_tool_parser(name)
    except KeyError as error:
        known = ", ".join(sorted({*ToolParserManager.tool_parsers, *ToolParserManager.lazy_parsers}))
        raise SettingsError(f"expected gateway.tool_parser to be hermes, json or one of {known}, got {name}") from error

    def extract(text: str, tools: list[dict[str, Any]]) -> tuple[str, list[tuple[str, str]]]:
        request = ChatCompletionRequest(model="", messages=[{"role": "user", "content": ""}], tools=tools)
        # A new parser for each text, since a parser keeps the state of a stream.
        found = parser(tokenizer.transformers_tokenizer, request.tools).extract_tool_calls(text, request)
        if not found.tools_called:
            return text, []
        return found.content or "", [(call.function.name, call.function.arguments) for call in found.tool_calls]

    return extract
