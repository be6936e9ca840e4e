"""Between requesters' text and the engine's tokens: prompts become token ids, and sampled tokens text that can be sent.

A stop string is cut off, and so nothing is sent that may be the beginning of one; the tokens themselves are all told.
"""

import json
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Protocol

from pydantic import JsonValue

from streamrl.producers.gateway.refusals import invalid
from streamrl.producers.gateway.requests import ChatCompletionRequest, ChatMessage
from streamrl.producers.generation.engines.port import MAX_SAID, Tokenizer
from streamrl.producers.generation.incremental_text import IncrementalText
from streamrl.producers.generation.rollout import shown_text
from streamrl.schemas.trajectories import FinishReason, SamplingParams

LONG_TEXT = 1 << 15
"""Characters from which a prompt is tokenised in a thread: below, the thread would cost more than it frees."""


class ChatTokenizer(Tokenizer, Protocol):
    """A ``Tokenizer`` that also renders conversations with tools; ``ModelTokenizer`` is one."""

    @property
    def has_chat_template(self) -> bool:
        """Whether chat turns can be rendered."""
        ...

    @property
    def reads_tools(self) -> bool:
        """Whether the chat template tells the model of tools."""
        ...

    def encode_text(self, text: str) -> list[int]:
        """Token ids of plain text."""
        ...

    def encode_more(self, text: str) -> list[int]:
        """Token ids of text that goes on behind other tokens: nothing is put in front."""
        ...

    def encode_chat(
        self, turns: Sequence[Mapping[str, JsonValue]], tools: Sequence[Mapping[str, JsonValue]] | None = None
    ) -> list[int]:
        """Token ids of chat turns, with the opening of the answer; the template may raise what it likes."""
        ...

    def decode_with_special(self, token_ids: Sequence[int]) -> str:
        """Text of tokens, special ones written out."""
        ...

    def is_special(self, token_id: int) -> bool:
        """Whether a token is no text."""
        ...


class SpecialsShown:
    """A tokenizer's text with special tokens written out: a model may have tool calls between some of them."""

    def __init__(self, tokenizer: ChatTokenizer) -> None:
        self._tokenizer = tokenizer
        self.encode_prompt = tokenizer.encode_prompt
        self.is_special = tokenizer.is_special

    def decode(self, token_ids: Sequence[int]) -> str:
        """Text of tokens."""
        return self._tokenizer.decode_with_special(token_ids)


def chat_token_ids(tokenizer: ChatTokenizer, request: ChatCompletionRequest) -> list[int]:
    """The prompt of a conversation.

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
    except Exception as error:  # templates raise what they like, of what they do not like
        said = f"{type(error).__name__}: {error}"[:MAX_SAID]
        raise invalid(
            "messages", f"the model's chat template refused the messages: {said}", "template_error"
        ) from error


def _turn(message: ChatMessage, number: int) -> dict[str, Any]:
    # OpenAI's newer name for what every template calls system.
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
                # Templates write arguments out themselves, so they take values and no JSON text.
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
            f"messages.{number}.tool_calls", "expected arguments in JSON in a tool call, got another text"
        ) from error


def conversation_text(request: ChatCompletionRequest) -> str:
    """The messages as text, for features and displays, never for tokens."""
    return "\n".join(message.text for message in request.messages)


class ReplyText:
    """The text of one completion as its tokens come.

    ``decode_next`` returns what can be sent by now, ``finish`` the rest.

    ``openers``: texts at which something begins that is not to be sent as it stands, such as a tool call; from the
    first of them on everything is held back. ``text`` is all there is so far, with what is held back. ``hides``: the
    token that ended it is no text, where the tokenizer writes special tokens out.
    """

    def __init__(
        self,
        tokenizer: Tokenizer,
        sampling: SamplingParams,
        openers: Sequence[str] = (),
        hides: Callable[[int], bool] = lambda token_id: False,
    ) -> None:
        self._grown = IncrementalText(tokenizer)
        self._sampling = sampling
        self._marks = (*sampling.stop, *openers)
        # At a whole stop string the engine ends the completion, and what is said of it is known with the end.
        self._bounds = tuple(openers) if sampling.include_stop_str_in_output else self._marks
        self._settled = ""
        self._pending = ""
        self._sent = 0
        self.hides = hides

    @property
    def text(self) -> str:
        """All of it."""
        return self._settled + self._pending

    def decode_next(self, token_ids: Sequence[int]) -> str:
        """Take in tokens; the text that follows what was sent before, if any can be."""
        piece = self._grown.decode_next(token_ids)
        if not self._grown.is_settled:
            self._pending = piece
            return ""
        self._settled, self._pending = self._settled + piece, ""
        return self._send(self._end(len(self._settled) - self._held_back()))

    @property
    def unsent(self) -> str:
        """What is held back."""
        return self.text[self._sent :]

    def finish(self, reason: FinishReason | None) -> str:
        """No more tokens come: what is left before an opener; ``text`` becomes what the requester sees of it all."""
        self._settled = shown_text(self.text, reason, self._sampling)
        self._pending = ""
        return self._send(self._end(len(self._settled)))

    def _send(self, end: int) -> str:
        piece = self._settled[self._sent : end]
        self._sent = max(self._sent, end)
        return piece

    def _end(self, end: int) -> int:
        """Where the first opener or stop string is, or else ``end``."""
        return min([end, *(at for mark in self._bounds if (at := self._settled.find(mark)) >= 0)])

    def _held_back(self) -> int:
        """Characters at the end that may be the beginning of a stop string or of an opener."""
        held = 0
        for mark in self._marks:
            for length in range(min(len(mark) - 1, len(self._settled)), held, -1):
                if self._settled.endswith(mark[:length]):
                    held = length
                    break
        return held
