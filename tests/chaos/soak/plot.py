"""The soak as a picture: memory and file descriptors of every process over time."""

from collections.abc import Sequence
from pathlib import Path

from tests.chaos.soak.samples import MIB, Sample


def write_plot(target: Path, samples: Sequence[Sample], title: str) -> None:
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    figure, (memory, descriptors) = pyplot.subplots(2, 1, sharex=True, figsize=(9, 7))
    roles = sorted({sample.role for sample in samples})
    for number, role in enumerate(roles):
        lives = {sample.pid for sample in samples if sample.role == role}
        for life, pid in enumerate(sorted(lives)):
            points = [sample for sample in samples if sample.role == role and sample.pid == pid]
            minutes = [point.at / 60 for point in points]
            style = {"color": f"C{number}", "label": role if life == 0 else None, "linewidth": 1.2}
            memory.plot(minutes, [point.memory / MIB for point in points], **style)
            descriptors.plot(minutes, [point.descriptors for point in points], **style)
    memory.set_ylabel("resident memory, MiB")
    memory.set_title(title)
    memory.legend(loc="center right", fontsize=8, ncols=2)
    descriptors.set_ylabel("open file descriptors")
    descriptors.set_xlabel("minutes; a gap is a kill and a restart")
    for axes in (memory, descriptors):
        axes.set_ylim(bottom=0)
        axes.grid(alpha=0.3)
    figure.tight_layout()
    target.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(target, dpi=110)
    pyplot.close(figure)
