"""The policy's own tokenizer behind the tokenizer port. Knows nothing of engines or sampling.

Plain text gets the tokens that the tokenizer itself puts in front, such as a beginning-of-sequence token. It gets no
end-of-sequence token, which would end the prompt. Chat turns get exactly the tokens that the chat template writes.
"""

from collections.abc import Mapping, Sequence
from types import MappingProxyType
from typing import Any

from pydantic import JsonValue
from transformers import AutoTokenizer

from streamrl.schemas.errors import ModelError, PromptRefused
from streamrl.schemas.trajectories import Prompt

_PARTS = ("tool_calls", "tools", "name")
"""Parts of a conversation: if the chat template leaves one out, the prompt is refused. A tool's turn may lose its name,
which the call before it has, too."""


class ModelTokenizer:
    """A ``Tokenizer`` read from a model directory; the chat template gets ``chat_template_kwargs`` as variables."""

    def __init__(self, model_path: str, chat_template_kwargs: Mapping[str, JsonValue] = MappingProxyType({})) -> None:
        """Load the tokenizer.

        Raises:
            ModelError: there is no tokenizer, or the chat template does not read one of the variables.
        """
        self._model_path = model_path
        try:
            self._tokenizer: Any = AutoTokenizer.from_pretrained(model_path)
        except Exception as error:
            reason = next((line for line in str(error).splitlines() if line), type(error).__name__)
            raise ModelError(
                f"expected a tokenizer at {model_path}, got: {reason}; use a model directory that has one"
            ) from error
        # For a model without tokenizer files the library makes a tokenizer without any text tokens.
        if not set(self._tokenizer.get_vocab()) - set(self._tokenizer.all_special_tokens):
            raise ModelError(
                f"expected a tokenizer at {model_path}, got a model without one (no tokenizer.json or the like); "
                "copy the files of the tokenizer that belongs to the model into its directory"
            )
        self._chat_template_kwargs = dict(chat_template_kwargs)
        # Templates ignore unknown variables, so a misspelt name would silently have no effect.
        template = str(self._tokenizer.chat_template or "")
        for name in chat_template_kwargs:
            if name not in template:
                raise ModelError(
                    f"expected a chat template at {model_path} that reads {name} (data.chat_template_kwargs), "
                    f"got {'one that does not' if template else 'none'}; remove the key, or correct its name"
                )

    def encode_prompt(self, prompt: Prompt) -> list[int]:
        """Token ids of a prompt. Chat turns go through the model's chat template, with the start of the answer.

        Raises:
            ModelError: the prompt has chat turns, and the model has no chat template.
            PromptRefused: the chat template would leave out a part of the prompt.
        """
        if isinstance(prompt.content, str):
            return self._with_opening(prompt.content)
        if not self._tokenizer.chat_template:
            raise ModelError(
                f"expected a chat template in the tokenizer at {self._model_path} for prompt {prompt.prompt_id}, "
                f"got none; use plain text prompts or an instruction-tuned model"
            )
        turns: list[dict[str, JsonValue]] = [turn.model_dump() for turn in prompt.content]
        token_ids = self.encode_chat(turns, prompt.tools)
        for part in _PARTS:
            less = [{key: turn[key] for key in turn if key != part or turn["role"] == "tool"} for turn in turns]
            tools = [] if part == "tools" else prompt.tools
            if (less != turns or tools != prompt.tools) and self._says_the_same(token_ids, less, tools):
                raise PromptRefused(
                    f"with {part}, which the chat template leaves out",
                    f"expected a chat template at {self._model_path} that shows {part} to the model, got one that "
                    f"leaves {part} out; use a model that was taught to read it, or remove it from the data",
                )
        return token_ids

    def _says_the_same(
        self, token_ids: list[int], turns: Sequence[Mapping[str, JsonValue]], tools: Sequence[Mapping[str, JsonValue]]
    ) -> bool:
        try:
            return self.encode_chat(turns, tools) == token_ids
        except Exception:  # a template that misses the part reads it
            return False

    @property
    def has_chat_template(self) -> bool:
        """Whether chat turns can be rendered."""
        return bool(self._tokenizer.chat_template)

    @property
    def reads_tools(self) -> bool:
        """Whether the chat template describes tools to the model."""
        return "tools" in str(self._tokenizer.chat_template or "")

    @property
    def transformers_tokenizer(self) -> Any:
        """Transformers' own tokenizer object, for libraries that need it."""
        return self._tokenizer

    def encode_text(self, text: str) -> list[int]:
        """Token ids of a prompt that is plain text."""
        return self._with_opening(text)

    def encode_more(self, text: str) -> list[int]:
        """Token ids of text that follows other tokens, without a beginning-of-sequence token."""
        return self._plain(text)

    def encode_chat(
        self, turns: Sequence[Mapping[str, JsonValue]], tools: Sequence[Mapping[str, JsonValue]] | None = None
    ) -> list[int]:
        """Token ids of chat turns as the template writes them, with the start of the answer. Needs a chat template.

        Raises:
            Exception: the template may raise any exception.
        """
        # Rendered as text first: the template writes its special tokens itself, so tokenising must not add any.
        more = self._chat_template_kwargs | ({"tools": list(tools)} if tools else {})
        return self._plain(
            self._tokenizer.apply_chat_template(list(turns), tokenize=False, add_generation_prompt=True, **more)
        )

    def decode(self, token_ids: Sequence[int]) -> str:
        """Text of sampled tokens, without special tokens."""
        return self._decoded(token_ids, skip_special=True)

    def decode_with_special(self, token_ids: Sequence[int]) -> str:
        """Text of sampled tokens, including special tokens."""
        return self._decoded(token_ids, skip_special=False)

    def is_special(self, token_id: int) -> bool:
        """Whether a token is a special token, such as the end of a sequence."""
        return token_id in self._tokenizer.all_special_ids

    def _decoded(self, token_ids: Sequence[int], *, skip_special: bool) -> str:
        text: str = self._tokenizer.decode(
            list(token_ids), skip_special_tokens=skip_special, clean_up_tokenization_spaces=False
        )
        return text

    def _with_opening(self, text: str) -> list[int]:
        plain = self._plain(text)
        special: list[int] = self._tokenizer(text)["input_ids"]
        # Finds the text's own tokens in ``special``. Tokens before them are kept, tokens after them are cut off.
        for start in range(len(special) - len(plain) + 1):
            if special[start : start + len(plain)] == plain:
                return special[: start + len(plain)]
        return plain

    def _plain(self, text: str) -> list[int]:
        token_ids: list[int] = self._tokenizer(text, add_special_tokens=False)["input_ids"]
        return token_ids
