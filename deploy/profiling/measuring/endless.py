"""A copy of a model's directory that knows no end-of-sequence token, so that completions have the length they shall.

The weights are linked, not copied. Knows no engine.
"""

import json
from pathlib import Path
from typing import Any

from schemas.errors import ModelError

REWRITTEN = ("config.json", "generation_config.json")
END = "eos_token_id"


def endless_model(model: str, directory: Path) -> Path:
    """A directory that loads like the model, and never ends a completion by itself.

    Raises:
        ModelError: the model is not on this machine.
    """
    source = _local(model)
    directory.mkdir(parents=True)
    for path in source.iterdir():
        if path.is_file() and path.name not in REWRITTEN:
            (directory / path.name).symlink_to(path.resolve())
    for name in REWRITTEN:
        if (source / name).is_file():
            content = json.loads((source / name).read_text())
            (directory / name).write_text(json.dumps(_without_end(content)))
    return directory


def _local(model: str) -> Path:
    if (path := Path(model)).is_dir():
        return path
    from huggingface_hub import snapshot_download
    from huggingface_hub.errors import LocalEntryNotFoundError

    try:
        return Path(snapshot_download(model, local_files_only=True))
    except (LocalEntryNotFoundError, ValueError) as error:
        raise ModelError(f"expected a local model (model.path), got {model!r}: download it first") from error


def _without_end(content: dict[str, Any]) -> dict[str, Any]:
    return {
        name: _without_end(value) if isinstance(value, dict) else None if name == END else value
        for name, value in content.items()
    }
