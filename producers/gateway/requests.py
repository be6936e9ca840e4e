"""Request bodies as OpenAI's clients send them, read strictly; a refusal names the mistake.

A field that would change the sampled tokens, and that no engine here supports, is refused rather than ignored. Fields
that do not change them (``user``, ``metadata``) are accepted and ignored. Unknown names are refused.
"""

import json
from collections.abc import Iterable
from typing import Annotated, Any, Literal, NoReturn, Self, TypeVar

from pydantic import BaseModel, ConfigDict, Field, JsonValue, ValidationError, model_validator

from streamrl.producers.gateway.refusals import ApiError, invalid
from streamrl.schemas.trajectories import StopStrings

MAX_MESSAGES = 4096
MAX_TOOLS = 128
MAX_TEXT = 1 << 20
"""Characters of one prompt or message; records on the topics have the same bound."""
SESSION_NAME = r"^[A-Za-z0-9._:@-]{1,128}$"
"""Pattern of a session's name, which may be part of a URL."""


class ApiModel(BaseModel):
    """A part of a body; types are not converted and unknown names are refused."""

    model_config = ConfigDict(strict=True, extra="forbid", allow_inf_nan=False, frozen=True)


Text = Annotated[str, Field(max_length=MAX_TEXT)]
Name = Annotated[str, Field(min_length=1, max_length=256)]
TokenIds = Annotated[list[Annotated[int, Field(ge=0, lt=1 << 31)]], Field(min_length=1)]


class TextPart(ApiModel):
    """A text part of a message; a text model cannot read other parts."""

    type: Literal["text"]
    text: Text


class CalledFunction(ApiModel):
    """A called function. ``arguments``: JSON, as text."""

    name: Name
    arguments: Text


class ToolCall(ApiModel):
    """A call that the assistant made earlier in the conversation."""

    id: Name
    type: Literal["function"] = "function"
    function: CalledFunction


class ChatMessage(ApiModel):
    """One message. Only an assistant's message that calls tools may have no content.

    The fields that can only be null exist because some clients send them back with an answer.
    """

    role: Literal["system", "developer", "user", "assistant", "tool"]
    content: Text | list[TextPart] | None = None
    name: Name | None = None
    tool_calls: Annotated[list[ToolCall], Field(min_length=1, max_length=MAX_TOOLS)] | None = None
    tool_call_id: Name | None = None
    refusal: None = None
    audio: None = None
    function_call: None = None
    reasoning: None = None
    reasoning_content: None = None
    annotations: Annotated[list[JsonValue], Field(max_length=0)] | None = None

    @model_validator(mode="after")
    def _has_content(self) -> Self:
        if self.content is None and not (self.role == "assistant" and self.tool_calls):
            raise ValueError(f"expected content in a message of role {self.role}, got none")
        if self.tool_calls and self.role != "assistant":
            raise ValueError(f"expected tool_calls only in an assistant's message, got them in role {self.role}")
        if self.role == "tool" and self.tool_call_id is None:
            raise ValueError("expected tool_call_id in a message of role tool, got none")
        return self

    @property
    def text(self) -> str:
        """The content as one text."""
        if isinstance(self.content, list):
            return "".join(part.text for part in self.content)
        return self.content or ""


FunctionName = Annotated[str, Field(pattern=r"^[A-Za-z0-9_.-]{1,64}$")]


class FunctionDefinition(ApiModel):
    """A function that a tool offers. ``strict``: arguments must fit ``parameters``, as a forced call's always do."""

    name: FunctionName
    description: Text | None = None
    parameters: dict[str, JsonValue] | None = None
    strict: bool | None = None


class ToolDefinition(ApiModel):
    """A function that the model may call."""

    type: Literal["function"]
    function: FunctionDefinition


class NamedFunction(ApiModel):
    """A function by its name."""

    name: FunctionName


class NamedToolChoice(ApiModel):
    """A ``tool_choice`` that forces the model to call one function."""

    type: Literal["function"]
    function: NamedFunction


class StreamOptions(ApiModel):
    """Options of a stream. ``include_obfuscation`` changes no token and is ignored."""

    include_usage: bool = False
    include_obfuscation: bool | None = None


class JsonSchemaFormat(ApiModel):
    """A JSON schema that the answer must fit, also without ``strict``. ``name`` and ``description`` are ignored."""

    name: Annotated[str, Field(pattern=r"^[A-Za-z0-9_-]{1,64}$")]
    description: Text | None = None
    definition: Annotated[dict[str, JsonValue], Field(alias="schema")]
    strict: bool | None = None


class ResponseFormat(ApiModel):
    """Text, any JSON object, or JSON that fits a schema."""

    type: Literal["text", "json_object", "json_schema"]
    json_schema: JsonSchemaFormat | None = None

    @model_validator(mode="after")
    def _has_its_schema(self) -> Self:
        if (self.json_schema is not None) != (self.type == "json_schema"):
            raise ValueError("expected json_schema with type json_schema, and only with it")
        return self


class SamplingFields(ApiModel):
    """Fields of both kinds of completion. ``top_k``, ``min_p`` and others are vLLM's additions to OpenAI's fields.

    ``return_token_ids``: answer with the token ids of prompt and completion, too. ``store`` false: the completion is
    never trained on.
    """

    model: Name
    temperature: Annotated[float, Field(ge=0, le=2)] | None = None
    top_p: Annotated[float, Field(gt=0, le=1)] | None = None
    top_k: Annotated[int, Field(ge=0, lt=1 << 31)] | None = None
    min_p: Annotated[float, Field(ge=0, le=1)] | None = None
    n: Annotated[int, Field(ge=1)] | None = None
    stop: Annotated[str, Field(min_length=1, max_length=256)] | list[str] | None = None
    include_stop_str_in_output: bool = False
    skip_special_tokens: bool | None = None
    seed: Annotated[int, Field(ge=-(1 << 63), lt=1 << 63)] | None = None
    stream: bool | None = None
    stream_options: StreamOptions | None = None
    return_token_ids: bool | None = None
    presence_penalty: float | None = None
    frequency_penalty: float | None = None
    repetition_penalty: float | None = None
    logit_bias: dict[str, float] | None = None
    user: Text | None = None
    metadata: dict[str, JsonValue] | None = None
    store: bool | None = None
    service_tier: Literal["auto", "default"] | None = None
    prompt_cache_key: Annotated[str, Field(max_length=256)] | None = None
    safety_identifier: Text | None = None

    @property
    def stops(self) -> StopStrings:
        """The stop strings as a tuple."""
        stop = self.stop or []
        return (stop,) if isinstance(stop, str) else tuple(stop)

    def check(self) -> None:
        """Refuse fields that are not supported, or that contradict each other.

        Raises:
            ApiError: the reason.
        """
        if len(self.stops) > 16 or not all(1 <= len(one) <= 256 for one in self.stops):
            raise invalid("stop", f"expected up to 16 stop strings of 1 to 256 characters, got {len(self.stops)}")
        if self.stream_options is not None and not self.stream:
            raise invalid("stream_options", "expected stream_options only with stream: true, got it without")
        for name, neutral in (("presence_penalty", 0.0), ("frequency_penalty", 0.0), ("repetition_penalty", 1.0)):
            if getattr(self, name) not in (None, neutral):
                raise invalid(name, f"expected {name} {neutral}, got another: this server supports no penalties")
        if self.logit_bias:
            raise invalid("logit_bias", "expected no logit_bias, got one: this server does not support it")

    def prefers_no_training(self) -> bool:
        """Whether the requester wants this completion kept out of training."""
        return self.store is False


class ChatCompletionRequest(SamplingFields):
    """The body of ``POST /v1/chat/completions``."""

    messages: Annotated[list[ChatMessage], Field(min_length=1, max_length=MAX_MESSAGES)]
    max_tokens: Annotated[int, Field(ge=1)] | None = None
    max_completion_tokens: Annotated[int, Field(ge=1)] | None = None
    logprobs: bool | None = None
    top_logprobs: Annotated[int, Field(ge=0, le=20)] | None = None
    tools: Annotated[list[ToolDefinition], Field(max_length=MAX_TOOLS)] | None = None
    tool_choice: Literal["auto", "none", "required"] | NamedToolChoice | None = None
    parallel_tool_calls: bool | None = None
    response_format: ResponseFormat | None = None
    modalities: list[Literal["text"]] | None = None

    @property
    def limit(self) -> int | None:
        """Most tokens of a completion, from either field."""
        return self.max_completion_tokens if self.max_tokens is None else self.max_tokens

    @property
    def offered_tools(self) -> list[ToolDefinition]:
        """The tools that the prompt describes to the model."""
        return [] if self.tool_choice == "none" else self.tools or []

    def check(self) -> None:
        """See ``SamplingFields``."""
        super().check()
        if self.max_tokens is not None and self.max_completion_tokens is not None:
            raise invalid("max_tokens", "expected one of max_tokens and max_completion_tokens, got both")
        if self.top_logprobs is not None and not self.logprobs:
            raise invalid("top_logprobs", "expected top_logprobs only with logprobs: true, got it without")
        if self.top_logprobs:
            raise invalid(
                "top_logprobs",
                f"expected top_logprobs 0, got {self.top_logprobs}: this server returns the log-probability of the "
                "sampled token only",
            )
        self._check_tools()

    def _check_tools(self) -> None:
        forced = self.tool_choice not in (None, "auto", "none")
        if self.tool_choice is not None and not self.tools:
            raise invalid("tool_choice", "expected tool_choice only with tools, got it without")
        names = [tool.function.name for tool in self.offered_tools]
        if isinstance(self.tool_choice, NamedToolChoice) and names.count(self.tool_choice.function.name) != 1:
            raise invalid("tool_choice", "expected a tool_choice that names one of the tools, got another name")
        if forced:
            return
        if any(tool.function.strict for tool in self.offered_tools):
            raise invalid(
                "tools",
                "expected strict only with a forced tool_choice, got it without: the calls that a model chooses to "
                "make are not forced to fit a schema",
            )
        if names and self.response_format is not None and self.response_format.type != "text":
            raise invalid(
                "response_format",
                f"expected response_format text where the model may call tools, got {self.response_format.type}: with "
                "it the model cannot call tools; leave one of the two out, or set tool_choice to none",
            )


class TextCompletionRequest(SamplingFields):
    """The body of ``POST /v1/completions``: prompts as text or as token ids."""

    prompt: Text | TokenIds | Annotated[list[Text | TokenIds], Field(min_length=1)]
    max_tokens: Annotated[int, Field(ge=1)] | None = None
    logprobs: Annotated[int, Field(ge=0, le=5)] | None = None
    echo: bool | None = None
    best_of: Annotated[int, Field(ge=1)] | None = None
    suffix: str | None = None

    @property
    def prompts(self) -> list[str | list[int]]:
        """The prompts, each as text or token ids."""
        prompt = self.prompt
        if isinstance(prompt, str):
            return [prompt]
        if isinstance(prompt[0], int):
            return [prompt]
        return prompt

    def check(self) -> None:
        """See ``SamplingFields``."""
        super().check()
        if self.logprobs:
            raise invalid(
                "logprobs",
                f"expected logprobs 0, got {self.logprobs}: this server returns the log-probability of the sampled "
                "token only",
            )
        if self.echo:
            raise invalid("echo", "expected echo false, got true: this server does not repeat the prompt")
        if self.best_of not in (None, self.n or 1):
            raise invalid("best_of", f"expected best_of to be n ({self.n or 1}), got {self.best_of}")
        if self.suffix:
            raise invalid("suffix", "expected no suffix, got one: this server completes at the end only")


class SessionGroup(ApiModel):
    """Sessions at one task, whose rewards are compared. ``size``: their number."""

    id: Annotated[str, Field(min_length=1, max_length=128)]
    size: Annotated[int, Field(ge=1, le=4096)]


class FeedbackRequest(ApiModel):
    """The body of ``POST /v1/feedback``: the reward of one choice of a completion, or of all its choices.

    Or the reward of a session, which ends the session. A completion within an open session is a turn. ``dataset``: the
    data set that metrics count the session's task to.
    """

    id: Annotated[str, Field(min_length=1, max_length=128)] | None = None
    session: Annotated[str, Field(pattern=SESSION_NAME)] | None = None
    group: SessionGroup | None = None
    dataset: Annotated[str, Field(pattern=r"^[a-z0-9._-]{1,64}$")] | None = None
    reward: Annotated[float, Field(ge=-1e6, le=1e6)] | None = None
    choice: Annotated[int, Field(ge=0, lt=4096)] = 0
    rewards: Annotated[list[Annotated[float, Field(ge=-1e6, le=1e6)]], Field(min_length=1, max_length=4096)] | None = (
        None
    )

    @model_validator(mode="after")
    def _one_of_both(self) -> Self:
        if (self.reward is None) == (self.rewards is None):
            raise ValueError("expected reward (of one choice) or rewards (of all, in order), got both or neither")
        if (self.id is None) == (self.session is None):
            raise ValueError("expected id (of a completion) or session (to be ended), got both or neither")
        if self.session is not None and (self.rewards is not None or self.choice):
            raise ValueError("expected one reward for the session, got rewards of choices")
        if self.session is None and (self.group is not None or self.dataset is not None):
            raise ValueError("expected group and dataset only with session, got them without")
        return self

    @property
    def by_choice(self) -> dict[int, float]:
        """Rewards by the index of their choice."""
        if self.rewards is not None:
            return dict(enumerate(self.rewards))
        assert self.reward is not None, "checked above"
        return {self.choice: self.reward}


BodyT = TypeVar("BodyT", bound=ApiModel)


def read_body(model: type[BodyT], data: bytes) -> BodyT:
    """Parse and check a body.

    Raises:
        ApiError: it is not JSON, or does not fit ``model``; the message names the field.
    """
    try:
        return model.model_validate(read_json(data))
    except ValidationError as error:
        raise _refusal(error) from error


def read_json(data: bytes) -> Any:
    """Parse JSON strictly: without NaN, repeated names in an object, NUL characters and half surrogate pairs.

    Raises:
        ApiError: it is not strict JSON; the message says why.
    """
    try:
        value = json.loads(data, parse_constant=_refuse_constant, object_pairs_hook=_without_repeats)
        # Only escapes can produce invalid text, so a body without escapes needs no search.
        is_text = b"\\u" not in data or all(_is_text(text) for text in _texts(value))
    except RecursionError as error:
        raise invalid(None, "expected a JSON body, got one that is nested too deeply", "invalid_json") from error
    except ValueError as error:
        raise invalid(None, f"expected a JSON body, got: {str(error)[:200]}", "invalid_json") from error
    if not is_text:
        raise invalid(None, "expected text, got a NUL or half a surrogate pair in it", "invalid_text")
    return value


def _refuse_constant(name: str) -> NoReturn:
    raise ValueError(f"{name} is not a JSON number")


def _without_repeats(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    found = dict(pairs)
    if len(found) != len(pairs):
        names = [name for name, _ in pairs]
        raise ValueError(f"the name {next(name for name in names if names.count(name) > 1)!r:.60} twice in one object")
    return found


def _texts(value: Any) -> Iterable[str]:
    if isinstance(value, str):
        yield value
    elif isinstance(value, dict):
        for name, one in value.items():
            yield name
            yield from _texts(one)
    elif isinstance(value, list):
        for one in value:
            yield from _texts(one)


def _is_text(text: str) -> bool:
    return "\0" not in text and not any("\ud800" <= character <= "\udfff" for character in text)


def _refusal(error: ValidationError) -> ApiError:
    # The deepest of a union's errors says most: the other alternatives fail at the first level.
    found = max(error.errors(include_url=False, include_input=False), key=lambda one: len(one["loc"]))
    # The place's names and indices; its other parts are pydantic's names of types.
    place = [part for part in found["loc"] if isinstance(part, int) or part.isidentifier()]
    param = ".".join(map(str, place)) or None
    if found["type"] == "extra_forbidden":
        return invalid(param, f"unrecognized request argument: {param}", "unknown_parameter")
    message = found["msg"].removeprefix("Value error, ")
    return invalid(param, f"{param}: {message}" if param else message, "invalid_value")
