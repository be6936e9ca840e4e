"""Answers in the shape of OpenAI's API, whole or as chunks of a stream. They add versions of weights and token ids.

``weight_version`` is the version that sampled the first token. A choice's ``weight_versions`` say which version sampled
which tokens.
"""

from collections.abc import Sequence
from functools import cached_property
from typing import Any

from streamrl.producers.gateway.calls import CompletionCall, Reply, ReplyDelta, RunningCall
from streamrl.producers.gateway.formats import CallPiece, ForcedCalls
from streamrl.producers.gateway.tool_calls import FunctionCall, ParsedReply
from streamrl.schemas.trajectories import FinishReason

Json = dict[str, Any]


class AnswerShape:
    """Shapes the answers to one call."""

    def __init__(self, running: RunningCall) -> None:
        self._running, self._call, self._model = running, running.call, running.model
        self._options, self._form = running.call.answer, running.call.answer.format
        self._opened: set[int] = set()
        # Readers of forced tool calls, by choice.
        self._call_readers: dict[int, ForcedCalls] = {}
        # By choice: characters of the tokens whose log-probabilities were sent.
        self._lengths: dict[int, int] = {}

    def whole(self) -> Json:
        """The complete answer to a finished call."""
        name = "chat.completion" if self._call.kind == "chat" else "text_completion"
        return self._head(name) | {
            "choices": [self._choice(reply) for reply in self._running.replies],
            "usage": self._usage(),
        }

    def chunks(self, deltas: list[ReplyDelta]) -> list[Json]:
        """The chunks that a stream sends for these deltas, one for each choice."""
        return [chunk for delta in deltas for chunk in self._chunks(delta)]

    def closing(self) -> list[Json]:
        """The last chunks of a finished stream, before ``[DONE]``."""
        if not self._options.include_usage:
            return []
        return [self._chunk_head | {"choices": [], "usage": self._usage()}]

    @cached_property
    def _chunk_head(self) -> Json:
        return self._head("chat.completion.chunk" if self._call.kind == "chat" else "text_completion")

    def _head(self, name: str) -> Json:
        version = str(self._running.version)
        return {
            "id": self._call.public_id,
            "object": name,
            "created": int(self._call.created_at),
            "model": self._model.name,
            "system_fingerprint": version,
            "weight_version": version,
        }

    def _usage(self) -> Json:
        prompt, completion = self._running.prompt_tokens, self._running.completion_tokens
        return {"prompt_tokens": prompt, "completion_tokens": completion, "total_tokens": prompt + completion}

    def _choice(self, reply: Reply) -> Json:
        sampled = reply.sampled
        choice: Json = {"index": reply.index, "logprobs": self._logprobs(reply, sampled.token_ids, sampled.logprobs)}
        if self._call.kind == "chat":
            found = self._parsed(reply)
            message: Json = {"role": "assistant", "content": found.content, "refusal": None}
            if found.calls:
                message |= {"content": found.content or None, "tool_calls": [call.as_openai() for call in found.calls]}
            choice |= {"message": message, "finish_reason": self._reason(sampled.finish_reason, found)}
        else:
            choice |= {"text": reply.text.text, "finish_reason": self._reason(sampled.finish_reason)}
        choice["weight_versions"] = _spans(reply)
        if self._options.token_ids:
            choice |= {"prompt_token_ids": [*reply.prompt.token_ids], "token_ids": [*sampled.token_ids]}
        return choice

    def _chunks(self, delta: ReplyDelta) -> list[Json]:
        reply, is_chat = delta.reply, self._call.kind == "chat"
        first = reply.index not in self._opened
        self._opened.add(reply.index)
        choice: Json = {
            "index": reply.index,
            "logprobs": self._logprobs(reply, delta.token_ids, delta.logprobs),
            "finish_reason": None,
        }
        found = None
        if is_chat and self._form is not None and self._form.calls != "none":
            reader = self._call_readers.setdefault(reply.index, self._form.reader())
            calls = [self._call_delta(piece) for piece in reader.read(delta.text)]
            opening: Json = {"role": "assistant", "content": None} if first else {}
            choice["delta"] = opening | ({"tool_calls": calls} if calls else {})
        elif is_chat:
            said: Json = ({"role": "assistant", "content": ""} if first else {}) | _content(delta.text)
            if delta.finish_reason is not None and self._options.tools:
                found = self._parsed(reply)
                said |= _calls(found)
                if not found.calls and reply.text.unsent:
                    said["content"] = said.get("content", "") + reply.text.unsent
            choice["delta"] = said
        else:
            choice["text"] = delta.text
        if self._options.token_ids:
            choice["token_ids"] = [*delta.token_ids]
            if first:
                choice["prompt_token_ids"] = [*reply.prompt.token_ids]
        if delta.finish_reason is not None:
            choice["finish_reason"] = self._reason(delta.finish_reason, found)
            choice["weight_versions"] = _spans(reply)
        return [self._chunk_head | {"choices": [choice]}]

    @staticmethod
    def _call_delta(piece: CallPiece) -> Json:
        if piece.name is None:
            return {"index": piece.number, "function": {"arguments": piece.arguments}}
        return {"index": piece.number} | FunctionCall(piece.name, piece.arguments).as_openai()

    def _parsed(self, reply: Reply) -> ParsedReply:
        if self._form is not None:
            return self._form.parse(reply.text.text)
        return self._model.parse(reply, self._call)

    def _reason(self, reason: FinishReason | None, found: ParsedReply | None = None) -> str:
        calls = found is not None and bool(found.calls)
        if self._form is not None:
            # A call that the request named ends with "stop", as OpenAI's do: the model had no choice of a tool.
            calls = self._form.calls == "required"
        if calls and reason is FinishReason.STOP:
            return "tool_calls"
        return str(reason)

    def _logprobs(self, reply: Reply, token_ids: Sequence[int], logprobs: Sequence[float]) -> Json | None:
        if not self._options.logprobs:
            return None
        texts = [self._model.tokenizer.decode_with_special([token_id]) for token_id in token_ids]
        if self._call.kind == "chat":
            return {
                "content": [
                    {"token": text, "logprob": logprob, "bytes": [*text.encode()], "top_logprobs": []}
                    for text, logprob in zip(texts, logprobs, strict=True)
                ],
                "refusal": None,
            }
        offsets = []
        for text in texts:
            offsets.append(self._lengths.get(reply.index, 0))
            self._lengths[reply.index] = offsets[-1] + len(text)
        return {"tokens": texts, "token_logprobs": [*logprobs], "top_logprobs": None, "text_offset": offsets}


def _content(text: str) -> Json:
    return {"content": text} if text else {}


def _calls(found: ParsedReply) -> Json:
    if not found.calls:
        return {}
    return {"tool_calls": [{"index": index} | call.as_openai() for index, call in enumerate(found.calls)]}


def _spans(reply: Reply) -> list[Json]:
    return [
        {"version": str(span.version), "start": span.start, "end": span.end} for span in reply.sampled.version_spans()
    ]


def public_headers(call: CompletionCall, version: str) -> dict[str, str]:
    """StreamRL's headers of an answer: the version that sampled its first token, whether feedback is accepted, and the
    call's standing in its session, if the session is to become a trajectory.
    """
    training = call.training
    feedback = "open" if training.kept else "constrained" if training.constrained else "none"
    found = {"x-streamrl-weight-version": version, "x-streamrl-feedback": feedback}
    return found if training.turn is None else found | {"x-streamrl-session": training.turn.standing}
