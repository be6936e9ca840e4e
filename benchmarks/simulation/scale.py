"""Ranker and repack beyond the papers: 72B on 1,024 GPUs and more."""

from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import Literal

from benchmarks.simulation.papers import LAMINAR
from benchmarks.simulation.parameters import LAMINAR_SYSTEMS, known, laminar
from benchmarks.simulation.plant import Plant, System, Workload
from benchmarks.simulation.rows import Row, Task

Known = Literal["nothing", "ranker"]
Adoption = Literal["idle", "kept"]
FOUR: tuple[tuple[Known, bool, Adoption], ...] = (
    ("nothing", False, "idle"),
    ("nothing", True, "idle"),
    ("ranker", False, "idle"),
    ("ranker", True, "idle"),
)
"""What is known of lengths, repack, and when weights are taken."""


@dataclass(frozen=True)
class ScaleTask(Task):
    """``training`` GPUs and ``generating`` ones; the batch is so many ``times`` the paper's.

    ``slots``: completions that a replica may run; the bound is that of as many as the paper allows.
    """

    known: Known = "nothing"
    repack: bool = False
    adoption: Adoption = "idle"
    training: int = 768
    generating: int = 256
    times: int = 1
    slots: int = 1024

    def rank(self) -> int:
        """The largest takes as long as all others."""
        return 2 if self.gpus <= 1024 else 9

    def setting(self) -> tuple[Plant, Workload, System]:
        """As Laminar's 72B at 1,024 GPUs, with another split, or batch and replicas as many times as large."""
        row = replace(LAMINAR[-1], gpus=self.gpus, laminar=(self.training, self.generating))
        plant, work, _ = laminar(row, "streamrl_ranker_repack")
        system = replace(
            LAMINAR_SYSTEMS["streamrl_ranker_repack"],
            known=self.known,
            repack=self.repack,
            adoption=self.adoption,
            look_s=LOOK_S,
        )
        if self.known == "nothing":
            system = replace(system, strategy="least_loaded")
        # So many times the batch takes the trainer longer on so many times the GPUs by what the fit found serial.
        return replace(plant, slots=self.slots), replace(work, groups=work.groups * self.times), system

    def rows(self) -> list[Row]:
        """With what its split is."""
        place = {"training": self.training, "generating": self.generating, "slots": self.slots}
        return [{**row, **place} for row in super().rows()]

    def unbound(self, plant: Plant) -> Plant:
        """With as many slots as the paper allows."""
        return replace(plant, slots=known("concurrency"))


LOOK_S = 5.0
SPLITS = ((768, 256), (640, 384), (512, 512), (384, 640))
"""GPUs that train and that generate, of 1,024: Laminar's own split first."""
FEW_SLOTS = 256


def scale_tasks() -> Iterator[ScaleTask]:
    """All of them."""
    for training, generating in SPLITS:
        for choice in FOUR:
            yield _task(training, generating, choice)
    for choice in (*FOUR, ("ranker", False, "kept")):
        yield _task(*SPLITS[0], choice, slots=FEW_SLOTS)
    yield _task(12_288, 4096, FOUR[-1], times=16)


def _task(
    training: int, generating: int, choice: tuple[Known, bool, Adoption], *, times: int = 1, slots: int = 1024
) -> ScaleTask:
    known_of, is_repacked, adoption = choice
    name = f"{'ranker' if known_of == 'ranker' else 'no ranker'}, {'repack' if is_repacked else 'no repack'}"
    name += ", weights in flight" if adoption == "kept" else ""
    name = f"{training} + {generating}, {slots} slots: {name}"
    return ScaleTask(
        "scale", "none", "", "72B", training + generating, name, known=known_of, repack=is_repacked,
        adoption=adoption, training=training, generating=generating, times=times, slots=slots,
        measured=16 if times == 1 else 8,
    )  # fmt: skip
