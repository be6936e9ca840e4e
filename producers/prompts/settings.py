"""``[data]``: the prompts, their order and their wording. File formats are elsewhere."""

import re
from typing import Annotated, Any, Literal, Self

from pydantic import Field, JsonValue, field_validator, model_validator

from streamrl.schemas.settings import Section

PLACEHOLDER = "{prompt}"

_ARGUMENTS = {
    *("conversation", "chat_template", "add_generation_prompt", "continue_final_message", "tokenize"),
    "sanitize_control_tokens",
    *("padding", "truncation", "max_length", "return_tensors", "return_dict", "return_assistant_tokens_mask"),
    "tokenizer_kwargs",
}
"""Parameters of ``apply_chat_template`` itself, which workers set; users cannot."""
DATASET_NAME = r"^[A-Za-z0-9][A-Za-z0-9._-]{0,63}$"
DatasetName = Annotated[str, Field(pattern=DATASET_NAME)]


class MixturePart(Section):
    """One data set of a mixture; a plain number is read as its weight."""

    weight: Annotated[float, Field(gt=0, description="Relative share of the prompts.")] = 1.0
    options: Annotated[dict[str, JsonValue], Field(description="Options of this reasoning-gym data set.")] = {}

    @model_validator(mode="before")
    @classmethod
    def _accept_number_as_weight(cls, value: Any) -> Any:
        return {"weight": value} if isinstance(value, int | float) else value

    @field_validator("options")
    @classmethod
    def _check_options(cls, options: dict[str, JsonValue]) -> dict[str, JsonValue]:
        return _without_reserved(options)


class DataSettings(Section):
    """``[data]``."""

    requests_only: Annotated[
        bool,
        Field(
            description="The run has no prompts of its own. It trains only on requests to its gateway and on its "
            "environments, for which workers keep all slots."
        ),
    ] = False
    dataset: Annotated[
        DatasetName | None, Field(description="Name of a reasoning-gym data set, which generates prompts.")
    ] = None
    options: Annotated[
        dict[str, JsonValue], Field(description="Options of the reasoning-gym data set, such as min_terms.")
    ] = {}
    mixture: Annotated[
        dict[DatasetName, MixturePart],
        Field(description="Several reasoning-gym data sets: name to weight, or to {weight, options}."),
    ] = {}
    seed: Annotated[
        int | None,
        Field(
            ge=0,
            description="Seed of the prompts; unset: the run's. Generated sets whose seeds differ by less than 10,000 "
            "share prompts.",
        ),
    ] = None
    path: Annotated[
        str | None,
        Field(
            min_length=1,
            description="Stored prompts: a jsonl, parquet, csv or json file, a directory of such files, or a data set "
            "of the Hugging Face hub.",
        ),
    ] = None
    subset: Annotated[str | None, Field(description="Configuration of the data set at path, such as 'main'.")] = None
    split: Annotated[
        str, Field(min_length=1, description="Split of the data set at path; also a slice such as 'train[:1000]'.")
    ] = "train"
    format: Annotated[
        Literal["trl", "verl", "openrlhf"],
        Field(
            description="Columns of prompt and answer. trl: prompt, answer; verl: prompt, reward_model.ground_truth; "
            "openrlhf: input, label. A prompt is text or a list of {role, content}; other columns go to the rewards."
        ),
    ] = "trl"
    prompt_column: Annotated[
        str | None,
        Field(
            min_length=1,
            description="Column of the prompt; unset: the format's. Dots separate the parts of a nested column.",
        ),
    ] = None
    answer_column: Annotated[
        str | None, Field(min_length=1, description="Column that rewards get as 'answer'; unset: the format's.")
    ] = None
    filter: Annotated[
        str | None,
        Field(
            pattern=r"^[^:]+:[^:]+$",
            description="Function 'package.module:function' that gets an entry; entries for which it returns false "
            "are not used.",
        ),
    ] = None
    prompt_template: Annotated[
        str, Field(description="Template for text prompts; {prompt} is replaced by the prompt.")
    ] = PLACEHOLDER
    system_prompt: Annotated[
        str | None, Field(description="System turn before every prompt, which makes the prompt a chat.")
    ] = None
    conversational: Annotated[
        bool, Field(description="Send a text prompt as a user turn, so that the chat template is applied.")
    ] = False
    chat_template_kwargs: Annotated[
        dict[str, JsonValue],
        Field(description="Variables for the model's chat template, such as enable_thinking = false."),
    ] = {}

    @field_validator("options")
    @classmethod
    def _check_options(cls, options: dict[str, JsonValue]) -> dict[str, JsonValue]:
        return _without_reserved(options)

    @field_validator("chat_template_kwargs")
    @classmethod
    def _check_variables(cls, given: dict[str, JsonValue]) -> dict[str, JsonValue]:
        if arguments := _ARGUMENTS & set(given):
            raise ValueError(
                "expected only variables of the chat template, got arguments of apply_chat_template: "
                f"{', '.join(sorted(arguments))}"
            )
        return given

    @model_validator(mode="after")
    def _agree(self) -> Self:
        named = [name for name in ("requests_only", "path", "dataset", "mixture") if getattr(self, name)]
        if len(named) != 1:
            got = " and ".join(f"data.{name}" for name in named) or "none"
            raise ValueError(
                "expected exactly one of data.path (stored prompts), data.dataset or data.mixture (generated prompts) "
                f"and data.requests_only (no prompts), got {got}"
            )
        if self.path and self.options:
            raise ValueError("expected no data.options with data.path; options are for data.dataset")
        if self.mixture and self.options:
            raise ValueError("expected options inside each data set of data.mixture, got data.options as well")
        if self.answer_column is not None and self.answer_column == self.prompt_column:
            raise ValueError(
                f"expected an answer of its own in data.answer_column, got the prompt's column {self.answer_column!r}; "
                "every copy of the prompt would be right"
            )
        if PLACEHOLDER not in self.prompt_template:
            raise ValueError(f"expected {PLACEHOLDER} in data.prompt_template, got {self.prompt_template!r}")
        if doubled := re.search(r"\{\{.*?\}\}", self.prompt_template):
            raise ValueError(
                f"expected single braces in data.prompt_template, in which only {PLACEHOLDER} is replaced, got "
                f"{doubled[0]!r}"
            )
        return self

    @property
    def parts(self) -> dict[str, MixturePart]:
        """The reasoning-gym data sets by name; a single data set is the only part."""
        return self.mixture or {self.dataset or "": MixturePart(options=self.options)}


def _without_reserved(options: dict[str, JsonValue]) -> dict[str, JsonValue]:
    if "size" in options:
        raise ValueError("expected options without size, which is always 10,000 prompts, got size; remove it")
    if "seed" in options:
        raise ValueError("expected seed directly in [data], got it among the options")
    return options
