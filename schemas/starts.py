"""What a run depends on besides its settings, and the record of its starts, each with the changes before it.

A start is one line of ``starts.jsonl`` in the run's directory. Displays read it, and so does the next start.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Literal, NamedTuple

from pydantic import BaseModel, ConfigDict, ValidationError

from streamrl.schemas.errors import UserError


@dataclass(frozen=True)
class RunInput:
    """Files, code or a package that a run depends on. ``fingerprint`` None: not known, so that it is not compared.

    ``shapes_trajectories``: a change of it changes what a trajectory means, such as a reward function's code.
    """

    name: str
    fingerprint: str | None
    shapes_trajectories: bool = True


class ChangedValue(NamedTuple):
    """A setting or an input that changed since the previous start, with both values as text."""

    name: str
    before: str
    now: str

    def __str__(self) -> str:
        return f"{self.name} {self.before} → {self.now}"


class RunStart(BaseModel):
    """One start of a run.

    ``at``: seconds since the epoch. ``step``: the step that it continued from, 0 for a new run. ``inputs``:
    fingerprints by name. ``changed``: changes since the previous start. ``earlier_trajectories``: whether the
    trajectories that were sampled before are skipped ("skip") or trained ("train"); None: no change shapes them.
    """

    model_config = ConfigDict(frozen=True, extra="ignore")

    at: float
    step: int
    inputs: dict[str, str] = {}
    changed: tuple[ChangedValue, ...] = ()
    earlier_trajectories: str | None = None

    @property
    def is_marked(self) -> bool:
        """Whether curves may jump at this start: it continued a run, or a setting or an input had changed."""
        return bool(self.step or self.changed)

    def mark(self) -> tuple[str, Literal["resumed", "settings"]]:
        """The start in words, and the kind of its mark in curves."""
        text = f"resumed from step {self.step}"
        if not self.changed:
            return text, "resumed"
        return f"{text}; changed: {', '.join(map(str, self.changed))}", "settings"


def read_starts(path: Path) -> tuple[RunStart, ...]:
    """The starts in a file, the newest last; empty without a file. Incomplete lines are left out."""
    try:
        lines = path.read_text(errors="replace").splitlines()
    except OSError:
        return ()
    found = []
    for line in lines:
        try:
            found.append(RunStart.model_validate_json(line))
        except ValidationError:  # a start that was killed wrote only a part of its line
            continue
    return tuple(found)


def append_start(path: Path, start: RunStart) -> None:
    """Add a start to the file.

    Raises:
        UserError: the file cannot be written.
    """
    try:
        with path.open("a") as file:
            file.write(start.model_dump_json() + "\n")
    except OSError as error:
        raise UserError(f"expected to write {path}, got: {error.strerror}") from error


def changed_inputs(before: Mapping[str, str], now: Sequence[RunInput]) -> list[ChangedValue]:
    """The inputs that are known at both starts and differ."""
    return [
        ChangedValue(each.name, before[each.name], each.fingerprint)
        for each in now
        if each.fingerprint is not None and before.get(each.name, each.fingerprint) != each.fingerprint
    ]
