"""vLLM's tool parsers by name, on the text of whole completions: what a gateway needs of vLLM, without its engine."""

import importlib.util
from collections.abc import Callable
from typing import Any

from streamrl.producers.generation.tokenizer import ModelTokenizer
from streamrl.schemas.errors import SettingsError

ExtractToolCalls = Callable[[str, list[dict[str, Any]]], tuple[str, list[tuple[str, str]]]]
"""Text and tools, as OpenAI's API has them → text beside the calls, and name and arguments of each."""


def vllm_tool_parser(name: str, tokenizer: ModelTokenizer) -> ExtractToolCalls:
    """The parser of that name.

    Raises:
        SettingsError: vLLM is not installed, or has none of that name.
    """
    if importlib.util.find_spec("vllm") is None:
        raise SettingsError(
            f"expected gateway.tool_parser to be hermes or json where vLLM is not installed, got {name}: its parsers "
            "come with it"
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
        # Made for each text: a parser keeps what it has seen of a stream.
        found = parser(tokenizer.of_library, request.tools).extract_tool_calls(text, request)
        if not found.tools_called:
            return text, []
        return found.content or "", [(call.function.name, call.function.arguments) for call in found.tool_calls]

    return extract
