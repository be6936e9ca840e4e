"""A tiny model that reads conversations: the shape of ``tiny_model``, with a chat template and its special tokens."""

import json
from collections.abc import Sequence
from pathlib import Path

from benchmarks.small_model import VOCABULARY, build
from tests.pipeline.tiny_model import SHAPE
from tests.producers.generation.chat_templates import FAMILIES, MARKS, Family, save_tokenizer

POSITIONS = 512
TOOLS = (
    "{% if tools %}<|im_start|>system\n{{ tools | tojson }}<|im_end|>\n{% endif %}"
    "{% for m in messages %}<|im_start|>{{ m.role }}\n{{ m.content }}"
    "{% for call in m.tool_calls or [] %}{{ call.function | tojson }}{% endfor %}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)
"""A template that shows tools and their calls."""
PLAIN, OPENED = FAMILIES["smollm2"], FAMILIES["internlm2"]
"""The second one's tokenizer puts <s> before a text, and its template before a conversation."""
READS_TOOLS = Family(TOOLS, MARKS, MARKS[1], "")
TWO_ENDS = Family(PLAIN.template, ("<|endoftext|>", *MARKS), MARKS[1], "")
"""Its tokenizer ends a turn with a token that is not the end of a text."""


def save_chat_model(directory: Path, family: Family = PLAIN, ends: Sequence[str] = (), *, has_end: bool = True) -> Path:
    """The directory, with the model in it. ``ends``: tokens that config and generation_config name, if others than the
    tokenizer; ``has_end``: whether anything names an end.
    """
    build(POSITIONS, **SHAPE | {"vocab_size": VOCABULARY}).save_pretrained(directory)
    tokenizer = save_tokenizer(family, directory, eos_token=family.end if has_end else None)
    named = [tokenizer.convert_tokens_to_ids(end) for end in ends or [family.end] * has_end]
    for name in ("config.json", "generation_config.json"):
        content = json.loads((directory / name).read_text())
        content |= {"eos_token_id": named[0] if len(named) == 1 else named or None, "pad_token_id": None}
        (directory / name).write_text(json.dumps(content))
    return directory
