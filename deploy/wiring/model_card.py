"""The model card of a checkpoint: README.md with the YAML front matter that the Hugging Face hub reads.

It is written with the checkpoint and listed in its manifest. So it has the held-out results that are known by then: the
checkpoint's own weights are evaluated afterwards. It names no time, so equal checkpoints have equal cards.
"""

import json
import re
import tomllib
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path

from streamrl.consumers.training.checkpoints.manifest import CheckpointManifest
from streamrl.inspection.report.headline import changed_settings, held_out_of, setup_of
from streamrl.inspection.report.record import RunRecord, StepTable
from streamrl.schemas.evaluation import EVALUATED
from streamrl.schemas.identifiers import PolicyVersion
from streamrl.settings.differences import flat
from streamrl.settings.loading import as_toml
from streamrl.settings.run_directory import RunDirectory
from streamrl.settings.tree import Settings

PACKAGES = ("streamrl", "torch", "transformers", "peft")
HUB_NAME = re.compile(r"[\w][\w.-]*/[\w.-]+")
LOADED_BY = {
    "transformers": "from transformers import AutoModelForCausalLM, AutoTokenizer\n\n"
    'model = AutoModelForCausalLM.from_pretrained("THIS_DIRECTORY")\n'
    'tokenizer = AutoTokenizer.from_pretrained("THIS_DIRECTORY")',
    "peft": "from peft import AutoPeftModelForCausalLM\nfrom transformers import AutoTokenizer\n\n"
    'model = AutoPeftModelForCausalLM.from_pretrained("THIS_DIRECTORY")\n'
    'tokenizer = AutoTokenizer.from_pretrained("THIS_DIRECTORY")',
}
"""How to load a checkpoint, by the library that its files are for."""


def model_card(settings: Settings, manifest: CheckpointManifest, *, is_merged: bool = False) -> str:
    """The text of a checkpoint's card. ``is_merged``: its adapter was merged into the base."""
    from huggingface_hub import ModelCardData

    library = "peft" if settings.training.lora.rank and not is_merged else "transformers"
    record = _record(settings, manifest)
    data = settings.data
    front = ModelCardData(
        base_model=_hub_name(settings.model.path),
        datasets=[name] if (name := _hub_name(data.path or "")) else None,
        library_name=library,
        pipeline_tag="text-generation",
        tags=["streamrl", "reinforcement-learning", settings.algorithm.name],
    )
    rows = [*setup_of(record), ("step", f"{manifest.step} of {settings.training.max_steps} ({manifest.named_version})")]
    return "\n".join(
        [
            f"---\n{front.to_yaml()}\n---\n",
            f"# {settings.run.name}, step {manifest.step}\n",
            "A language model trained by reinforcement learning with StreamRL.\n",
            _table("trained", rows),
            *_held_out(record, manifest),
            f"## Load\n\n```python\n{LOADED_BY[library]}\n```\n",
            "## Settings that differ from the defaults\n",
            _table("setting", [(each.key, each.value) for each in changed_settings(record)]),
            "## Versions\n",
            _table("package", [(name, found) for name in PACKAGES if (found := _version(name))]),
        ]
    )


def _record(settings: Settings, manifest: CheckpointManifest) -> RunRecord:
    """The run as reports read it, with the evaluations that led to this checkpoint and none of its steps."""
    path = settings.run.path
    evaluations = _evaluations(RunDirectory(path).metrics, manifest)
    values = flat(tomllib.loads(as_toml(settings)))
    return RunRecord(settings.run.name, path, StepTable(evaluations=evaluations), settings=values)


def _evaluations(metrics: Path, manifest: CheckpointManifest) -> tuple[tuple[int, dict[str, float]], ...]:
    found: dict[int, dict[str, float]] = {}
    if not metrics.exists():
        return ()
    with metrics.open(encoding="utf-8", errors="replace") as file:
        # Most lines are those of steps, which are recognised without parsing.
        for line in file:
            if f'"{EVALUATED}"' in line and (row := _evaluation(line, manifest)) is not None:
                found[row[0]] = row[1]
    return tuple(sorted(found.items()))


def _evaluation(line: str, manifest: CheckpointManifest) -> tuple[int, dict[str, float]] | None:
    """A line's step and figures; None if a crash undid these weights, or the line is incomplete."""
    try:
        row = json.loads(line)
        evaluated, step = PolicyVersion.parse(row[EVALUATED]), int(row["step"])
    except (ValueError, LookupError, TypeError):
        return None
    # What the lineage continued from; earlier lineages count up to there.
    parent = manifest.parent.number if manifest.parent is not None else 0
    if step > (manifest.step if evaluated.lineage == manifest.lineage else parent):
        return None
    return step, {key: float(value) for key, value in row.items() if isinstance(value, int | float)}


def _held_out(record: RunRecord, manifest: CheckpointManifest) -> list[str]:
    if (found := held_out_of(record)) is None:
        return []
    values = dict(zip(found.steps, (found.before, found.after), strict=True))
    rows = [(f"{found.measure} at step {step}", f"{value:.3f}") for step, value in values.items()]
    note = f"Conditions: {found.measured_on}. Evaluated before this checkpoint (step {manifest.step}) was written."
    return ["## Held out\n", _table("held out", rows), f"{note}\n"]


def _table(title: str, rows: list[tuple[str, str]]) -> str:
    lines = [f"| {title} | |", "|---|---|", *(f"| {_cell(name)} | {_cell(text)} |" for name, text in rows)]
    return "\n".join([*lines, ""])


def _cell(text: str) -> str:
    return " ".join(text.replace("|", "\\|").split())


def _hub_name(path: str) -> str | None:
    """The hub's name of a model or data set; None for a local one, which the hub does not know."""
    return path if HUB_NAME.fullmatch(path) and not Path(path).exists() else None


def _version(package: str) -> str:
    try:
        return version(package)
    except PackageNotFoundError:
        return ""
