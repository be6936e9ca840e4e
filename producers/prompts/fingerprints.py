"""Fingerprints of the prompts' data, to notice that they changed between two starts of a run. Opens no data set."""

from collections.abc import Iterator
from pathlib import Path

from streamrl.producers.prompts.settings import DataSettings
from streamrl.schemas.fingerprints import code_fingerprint, files_fingerprint, hub_revision, package_version

CACHED = "cache-"
"""Start of the names of files that the `datasets` library leaves in a saved data set; they are no data."""


def prompts_fingerprint(settings: DataSettings) -> str | None:
    """The fingerprint of the prompts: of files their content, of a hub data set its commit, of generated ones the
    library's version. None if there are none, or it is not known.
    """
    if settings.path is None:
        return package_version("reasoning-gym") if settings.dataset or settings.mixture else None
    place = Path(settings.path).expanduser()
    try:
        if place.is_dir():
            return files_fingerprint({str(name): place / name for name in _data_files(place)})
        if place.exists():
            return files_fingerprint({"": place})  # a file that was moved is the same
    except OSError:
        return None
    return hub_revision(settings.path, "dataset")


def filter_fingerprint(settings: DataSettings) -> str | None:
    """The fingerprint of the filter's source; None if there is no filter."""
    return None if settings.filter is None else code_fingerprint(settings.filter)


def _data_files(directory: Path) -> Iterator[Path]:
    """The files below a directory, relative to it, without hidden ones and caches."""
    for path in directory.rglob("*"):
        name = path.relative_to(directory)
        hidden = any(part.startswith(".") for part in name.parts)
        if path.is_file() and not hidden and not path.name.startswith(CACHED):
            yield name
