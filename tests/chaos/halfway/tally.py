"""Inside a worker: how many tokens of each completion its engine has, in a file that outlives a SIGKILL."""

import os
from collections.abc import Iterable, Iterator
from pathlib import Path

from tests.chaos.runs.inside import is_role

VARIABLE = "TESTED_TALLY"


def install() -> None:
    """From now on each token that the engine hands over is noted before anybody hears of it."""
    if not is_role():
        return
    from streamrl.producers.generation.engines.port import ActiveCompletion
    from streamrl.producers.generation.engines.threaded import ThreadedEngine

    file = os.open(os.environ[VARIABLE], os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o644)
    take_in = ThreadedEngine._process

    def noted(advanced: Iterable[ActiveCompletion]) -> Iterator[ActiveCompletion]:
        for completion in advanced:
            os.write(file, f"{completion.request.request_id} {completion.generated}\n".encode())
            yield completion

    def noting(self: ThreadedEngine, advanced: Iterable[ActiveCompletion]) -> None:
        take_in(self, noted(advanced))

    ThreadedEngine._process = noting  # type: ignore[method-assign]


def read(path: Path) -> dict[str, int]:
    """Tokens by trajectory id, a prefix of another worker's included."""
    lines = path.read_text().splitlines() if path.exists() else []
    return {name: int(count) for name, count in (line.split() for line in lines)}
