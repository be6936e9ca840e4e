"""The demo's tokenizer with one more token for each fixed text of the mixed task set."""

from typing import Any

from benchmarks.peers.tasks import FIXED_TEXTS
from streamrl.demo.task import build_tokenizer


def build_mixed_tokenizer() -> Any:
    """A ``Qwen2Tokenizer``: a token is a byte, or a text that a data set writes around all its questions."""
    from tokenizers import AddedToken

    tokenizer = build_tokenizer()
    tokenizer.add_tokens([AddedToken(text, special=False, normalized=False) for text in FIXED_TEXTS])
    return tokenizer
