"""``python .ci/share_byte_code.py FROM TO``: byte code of one environment serves another that has the same file.

An installer leaves the time of a file as it was packed, and Python takes byte code for that of a file by size and time.
To compile what torch and transformers import takes half a minute.
"""

import os
import shutil
import sys
from pathlib import Path


def share(source: Path, target: Path) -> int:
    """Link what is compiled of equal files; how many files.

    ``source``, ``target``: directories of packages.
    """
    shared = 0
    for cache in source.rglob("__pycache__"):
        place = target / cache.relative_to(source)
        if not place.parent.is_dir():
            continue
        for compiled in cache.glob("*.pyc"):
            name = f"{compiled.name.partition('.')[0]}.py"
            if not (place / compiled.name).exists() and _are_equal(cache.parent / name, place.parent / name):
                place.mkdir(exist_ok=True)
                _link(compiled, place / compiled.name)
                shared += 1
    return shared


def _are_equal(one: Path, other: Path) -> bool:
    try:
        mine, its = one.stat(), other.stat()
    except FileNotFoundError:
        return False
    return (mine.st_size, int(mine.st_mtime)) == (its.st_size, int(its.st_mtime))


def _link(compiled: Path, place: Path) -> None:
    try:
        os.link(compiled, place)
    except OSError:  # on another file system
        shutil.copyfile(compiled, place)


if __name__ == "__main__":
    source, target = (next(Path(each).glob("lib/python*/site-packages")) for each in sys.argv[1:3])
    share(source, target)
