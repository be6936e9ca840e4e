"""Converts requesters' prompts to token ids, and sampled tokens to text that can be sent.

Stop strings are cut off, so text that may be the start of one is held back. All sampled tokens are reported.
"""

import json
from collections.abc import Mapping, Sequence
from typing import Any, Protocol

from pydantic import JsonValue

from streamrl.producers.gateway.refusals import invalid
from streamrl.producers.gateway.requests import ChatCompletionRequest, ChatMessage
from streamrl.producers.generation.engines.port import MAX_SAID, Decode, Tokenizer
from streamrl.producers.generation.incremental_text import IncrementalText
from streamrl.producers.generation.rollout import shown_text
from streamrl.schemas.trajectories import FinishReason, SamplingParams

LONG_TEXT = 1 << 15
"""Characters from which a prompt is tokenised in a thread. For shorter ones a thread costs more than it saves."""


class ChatTokenizer(Tokenizer, Protocol):
    """A ``Tokenizer`` that also renders conversations with tools; ``ModelTokenizer`` is one."""

    @property
    def has_chat_template(self) -> bool:
        """Whether chat turns can be rendered."""
        ...

    @property
    def reads_tools(self) -> bool:
        """Whether the chat template describes tools to the model."""
        ...

    def encode_text(self, text: str) -> list[int]:
        """Token ids of plain text."""
        ...

    def encode_more(self, text: str) -> list[int]:
        """Token ids of text that follows other tokens, without a beginning-of-sequence token."""
        ...

    def encode_chat(
        self, turns: Sequence[Mapping[str, JsonValue]], tools: Sequence[Mapping[str, JsonValue]] | None = None
    ) -> list[int]:
        """Token ids of chat turns, with the start of the answer. The template may raise any exception."""
        ...

    def decode_with_special(self, token_ids: Sequence[int]) -> str:
        """Text of tokens, including special tokens."""
        ...

    def is_special(self, token_id: int) -> bool:
        """Whether a token is a special token, or ends a completion."""
        ...


def chat_token_ids(tokenizer: ChatTokenizer, request: ChatCompletionRequest) -> list[int]:
    """Token ids of a conversation's prompt.

    Raises:
        ApiError: the model has no template for it, or the template refuses it.
    """
    if not tokenizer.has_chat_template:
        raise invalid("messages", "this model has no chat template; use /v1/completions", "no_chat_template")
    tools = [tool.model_dump(exclude_none=True) for tool in request.offered_tools]
    if tools and not tokenizer.reads_tools:
        raise invalid("tools", "this model's chat template takes no tools; leave them out", "no_tools")
    turns = [_turn(message, number) for number, message in enumerate(request.messages)]
    try:
        return tokenizer.encode_chat(turns, tools or None)
    except Exception as error:  # a template may raise any exception
        said = f"{type(error).__name__}: {error}"[:MAX_SAID]
        raise invalid(
            "messages", f"the model's chat template refused the messages: {said}", "template_error"
        ) from error


def _turn(message: ChatMessage, number: int) -> dict[str, Any]:
    # "developer" is OpenAI's newer name for the role that templates call "system".
    turn: dict[str, Any] = {"role": "system" if message.role == "developer" else message.role, "content": message.text}
    if message.name is not None:
        turn["name"] = message.name
    if message.tool_call_id is not None:
        turn["tool_call_id"] = message.tool_call_id
    if message.tool_calls is not None:
        turn["tool_calls"] = [
            {
                "id": call.id,
                "type": "function",
                # Templates write JSON themselves, so they get values rather than JSON text.
                "function": {"name": call.function.name, "arguments": _arguments(call.function.arguments, number)},
            }
            for call in message.tool_calls
        ]
    return turn


def _arguments(text: str, number: int) -> Any:
    try:
        return json.loads(text)
    except (ValueError, RecursionError) as error:
        raise invalid(
            f"messages.{number}.tool_calls", "expected a tool call's arguments as JSON text, got other text"
        ) from error


def conversation_text(request: ChatCompletionRequest) -> str:
    """The messages as text, for length features and displays. Never tokenised."""
    return "\n".join(message.text for message in request.messages)


class ReplyText:
    """The text of one completion while its tokens arrive.

    ``decode_next`` returns the text that can be sent now, ``finish`` the rest. ``text`` is all text so far, including
    text that is held back.

    ``openers``: strings that start something that is not sent as text, such as a tool call. Text is held back from the
    first of them on.
    """

    def __init__(self, decode: Decode, sampling: SamplingParams, openers: Sequence[str] = ()) -> None:
        self._decoder = IncrementalText(decode)
        self._sampling = sampling
        self._openers = openers
        self._settled = ""
        self._pending = ""
        self._sent = 0

    @property
    def text(self) -> str:
        """All text so far."""
        return self._settled + self._pending

    def decode_next(self, token_ids: Sequence[int]) -> str:
        """Decode more tokens; the new text that can be sent, which may be empty."""
        piece = self._decoder.decode_next(token_ids)
        if not self._decoder.is_settled:
            self._pending = piece
            return ""
        self._settled, self._pending = self._settled + piece, ""
        # The engine ends the completion at a stop string, whose last token may have more text.
        known = shown_text(self._settled, FinishReason.STOP, self._sampling)
        return self._send(min(len(known), len(self._settled) - self._held_back()))

    @property
    def unsent(self) -> str:
        """The text that is held back."""
        return self.text[self._sent :]

    def finish(self, reason: FinishReason | None) -> str:
        """End the text; the rest to be sent, up to an opener. ``text`` becomes the text that the requester sees."""
        self._settled = shown_text(self.text, reason, self._sampling)
        self._pending = ""
        return self._send(len(self._settled))

    def _send(self, end: int) -> str:
        """The text up to ``end``, or up to the first opener before it, that was not sent yet."""
        end = min([end, *(at for opener in self._openers if (at := self._settled.find(opener)) >= 0)])
        piece = self._settled[self._sent : end]
        self._sent = max(self._sent, end)
        return piece

    def _held_back(self) -> int:
        """Number of characters at the end that may be the start of a stop string or of an opener."""
        held = 0
        for mark in (*self._sampling.stop, *self._openers):
            for length in range(min(len(mark) - 1, len(self._settled)), held, -1):
                if self._settled.endswith(mark[:length]):
                    held = length
                    break
        return held
