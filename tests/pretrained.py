"""A pytest plugin: ``pretrained_model`` is SmolLM2-135M-Instruct, converted by the first test that asks for it."""

from pathlib import Path

import pytest

from streamrl.init.smollm2 import ensure_smollm2, find_gguf
from streamrl.schemas.errors import UserError


@pytest.fixture(scope="session")
def pretrained_model() -> Path:
    """Its directory; skips the test where its package is not installed."""
    try:
        find_gguf()
    except UserError as error:
        pytest.skip(str(error))
    return ensure_smollm2(print)
