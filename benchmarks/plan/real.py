"""Predictions beside real runs on real engines: profile, lengths of another run, plan; then the run itself.

Everything a user would do, with a user's commands: `streamrl profile` measures engine and trainer alone on the machine,
a short run with other prompts records output lengths, the prediction is made from these two, and only then `streamrl
run` shows what was predicted. The model's weights are random: what its answers are worth does not matter here, only
that they are sampled, and end where the model ends them.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path
from typing import Any

import tomli_w

from benchmarks.commands import STREAMRL, output_of
from benchmarks.plan.trial import row_of
from benchmarks.small_model import END, build, save
from streamrl.planning.planner import measured_settings, recorded_lengths, with_recorded_lengths
from streamrl.planning.prediction import CachedPrompts, simulate
from streamrl.producers.prompts.sources import open_source
from streamrl.schemas.profiles import DeviceProfile
from streamrl.settings.loading import load_settings
from streamrl.settings.placement import ProcessPlace

POSITIONS = 512
ENDS = (END, 300, 301, 302, 303)
"""Of 320 tokens those that end a completion, so that about every sixty-fourth does: lengths are nearly geometric."""
LONGEST = 384
PATIENCE_S = 900.0
"""A machine whose cores others use takes many times as long; that the figures are then worth nothing, ``load`` says."""


@dataclass(frozen=True)
class RealCase:
    """``fits``: no more processes compute at a time than the machine has cores, as a plan takes for granted."""

    mode: str
    workers: int
    fits: bool = True

    @property
    def name(self) -> str:
        """For a row."""
        return f"{self.workers} worker{'s' if self.workers > 1 else ''}, {self.mode}"


CASES = (
    RealCase("synchronous", 1),
    RealCase("synchronous", 2),
    RealCase("trajectory_async", 1),
    RealCase("trajectory_async", 2, fits=False),
)


def letters(completions: Sequence[str], **_columns: object) -> list[float]:
    """Share of letters: a reward that differs between samples, so that every sample is trained."""
    return [sum(map(str.isalpha, text)) / max(1, len(text)) for text in completions]


@dataclass
class RealEngine:
    """One engine on this machine: its profile, and its runs. ``python``: of the environment that has it."""

    engine: str
    python: str
    scratch: Path
    address: str
    steps: int
    is_quick: bool = False
    recorded: Path | None = None
    _runs: int = field(default=0)

    @cached_property
    def model(self) -> Path:
        """A small model whose completions end by themselves."""
        directory = self.scratch / "model"
        return directory if directory.exists() else save(build(POSITIONS), directory, ENDS)

    @cached_property
    def profile(self) -> Path:
        """What `streamrl profile` measures."""
        out = self.scratch / f"{self.engine}-profile.json"
        effort = ["--quick"] if self.is_quick else []
        self._streamrl("profile", self.config(CASES[0], "profile", seed=0), f"--out={out}", *effort)
        return out

    def rows(self, cases: Sequence[RealCase]) -> Iterator[dict[str, Any]]:
        """Prediction and run of each case."""
        if self.recorded is None:
            self.recorded = self.scratch / self._run(CASES[0], seed=1).stem
        profile = DeviceProfile.read(self.profile)
        lengths = recorded_lengths(self.recorded)
        for case in cases:
            settings = load_settings(self.config(case, "predicted", seed=0), [])
            with with_recorded_lengths(measured_settings(settings, profile, profile), lengths) as expected:
                source = CachedPrompts(open_source(expected.data, run_seed=expected.run.seed))
                transfer_s, cores = profile.weight_transfer_s, profile.cores
                predicted = simulate(expected, source, steps=self.steps, transfer_s=transfer_s, cores=cores)
            config = self._run(case, seed=0)
            ran = load_settings(config, [])
            named = {"kind": "real", "engine": self.engine, "workers": case.workers, "mode": case.mode}
            row = row_of(case.name, ran, predicted, ran.run.path / "metrics.jsonl", 1.0)
            yield named | {"fits": case.fits} | row | {"lengths_recorded": len(lengths)}

    def _run(self, case: RealCase, seed: int) -> Path:
        self._runs += 1
        config = self.config(case, f"{self._runs}", seed)
        self._streamrl("run", config, f"--kafka.bootstrap_servers={self.address}")
        return config

    def config(self, case: RealCase, suffix: str, seed: int) -> Path:
        """The configuration of a run, written down; the prompts follow from the seed."""
        name = f"{self.engine}-{case.mode.replace('_', '-')}-{case.workers}-{suffix}"
        tree: dict[str, dict[str, Any]] = {
            "run": {"name": name, "directory": str(self.scratch), "workers": case.workers, "seed": seed},
            "model": {"path": str(self.model)},
            "data": {"dataset": "chain_sum"},
            "rewards": {"functions": ["benchmarks.plan.real:letters"]},
            "loop": {
                "mode": case.mode,
                "groups_per_step": 12,
                "num_generations": 4,
                "max_prompt_length": 96,
                "max_completion_length": LONGEST,
                "bucket_boundaries": [32, 64, 128],
            },
            "generation": {"engine": self.engine, "max_num_seqs": 32},
            "batching": {"token_budget": 2048},
            # Hardly any: the lengths that were recorded shall be those of the run's end, too.
            "training": {"max_steps": self.steps, "learning_rate": 1e-6, "threads": 1},
            "emulation": {"lengths": {"prompt_characters_per_token": 1.0}},
        }
        config = self.scratch / f"{name}.toml"
        config.write_text(tomli_w.dumps(tree))
        return config

    def _streamrl(self, command: str, config: Path, *options: str) -> None:
        output_of([self.python, *STREAMRL[1:], command, str(config), *options], ProcessPlace().environment, PATIENCE_S)
