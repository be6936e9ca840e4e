"""TRL's GRPOTrainer on the plan, as its owner sees it: its environment, its settings, what it left behind."""

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

from benchmarks.commands import ROOT, launch
from benchmarks.peers.contenders.plan import Plan, Saved, Trained

ENVIRONMENT = ROOT / ".venv-trl"
REQUIREMENTS = Path(__file__).parents[1] / "requirements-trl.txt"
TUNED: dict[str, Any] = {
    "processes": 1,
    "threads": 2,
    "wait_policy": "PASSIVE",
    "micro_batch": 32,
    "optimizer_steps_per_generation": 1,
    "continuous_batching": False,
    "cache_implementation": None,
    # Torch's own backward pass of attention is slow in bfloat16 on a CPU.
    "attn_implementation": {"float32": "sdpa", "bfloat16": "eager"},
}
"""The best settings found on two cores; see the README for what was tried."""
VARIANTS: dict[str, dict[str, Any]] = {
    "one process": {},
    # Data parallel on gloo: each process generates and trains half of the batch on a thread of its own.
    "two processes": {"processes": 2, "threads": 1},
    # One generation of twice the samples for two optimizer steps: its longest completion is waited for half as often,
    # and the second step is a step off policy.
    "two processes, two steps a generation": {
        "processes": 2,
        "threads": 1,
        "optimizer_steps_per_generation": 2,
    },
}
"""What replaces some of ``TUNED``. ``micro_batch``: most completions of a process at once.

Not among them, since weights reach neither on a CPU: generation by vLLM's server, and the asynchronous trainer, which
needs that server. TRL sends weights over NCCL alone and refuses other devices (``generation/vllm_client.py``).
"""
MEASURES = {
    "reward": "reward",
    "mean_length": "completions/mean_length",
    "max_length": "completions/max_length",
    "step_s": "step_time",
}
"""Our names of measures, and those of TRL's log."""


def ensure_environment() -> Path:
    """The interpreter of TRL's environment, made from the pinned requirements unless it is there already.

    Raises:
        subprocess.CalledProcessError: it could not be made.
    """
    python, made = ENVIRONMENT / "bin" / "python", ENVIRONMENT / "requirements.txt"
    if not made.exists() or made.read_text() != REQUIREMENTS.read_text():
        uv = str(Path(sys.executable).with_name("uv"))
        print(f"installing TRL into {ENVIRONMENT.name}", flush=True)
        subprocess.run([uv, "venv", "-q", "--clear", "--python", sys.executable, str(ENVIRONMENT)], check=True)
        options = ("--compile-bytecode", "--no-deps", "--python", str(python))
        subprocess.run([uv, "pip", "install", "-q", *options, "-r", str(REQUIREMENTS)], check=True)
        made.write_text(REQUIREMENTS.read_text())
    return python


def versions() -> dict[str, str]:
    """Versions of what matters in TRL's environment."""
    pinned = dict(line.split("==") for line in REQUIREMENTS.read_text().split() if "==" in line)
    return {name: pinned[name] for name in ("trl", "transformers", "torch", "accelerate")}


def train(variant: str, plan: Plan, tuning: dict[str, Any] | None = None) -> Trained:
    """Run a key of ``VARIANTS``. ``tuning`` replaces some of its settings.

    Raises:
        RuntimeError: it failed.
    """
    python = ensure_environment()
    plan.output.mkdir(parents=True)
    tuned = TUNED | VARIANTS[variant] | (tuning or {})
    written = plan.output / "plan.json"
    written.write_text(json.dumps(plan.as_json() | {"trl": tuned}))
    threads = str(tuned["threads"])
    environment = {
        "OMP_NUM_THREADS": threads,
        "MKL_NUM_THREADS": threads,
        "OMP_WAIT_POLICY": tuned["wait_policy"],
        "TOKENIZERS_PARALLELISM": "false",
        "PYTHONPATH": str(ROOT),
    }
    command = [str(python), "-W", "ignore", *_launcher(tuned["processes"]), str(written)]
    launched = launch(command, environment, plan.cores, plan.limit_s, plan.output / "output.log")
    if launched.exit_code not in (0, None):
        raise RuntimeError(f"expected TRL to train, got exit code {launched.exit_code}; see {plan.output}/output.log")
    saved = tuple(
        Saved(row["step"], row["time"] - launched.began, Path(row["weights"]))
        for row in _rows(plan.output / "saved.jsonl")
        if (Path(row["weights"]) / "model.safetensors").exists()
    )
    same = plan.hyperparameters
    samples = same.groups_per_step * same.num_generations
    steps = tuple(
        {"step": row["step"], "seconds": row["time"] - launched.began}
        | {ours: row[theirs] for ours, theirs in MEASURES.items() if theirs in row}
        | _counted(samples, row.get("completions/mean_length", 0.0))
        for row in _rows(plan.output / "steps.jsonl")
        if "reward" in row
    )
    return Trained(
        f"TRL GRPOTrainer, {variant}", plan.seed, saved, steps, launched.exit_code == 0, launched.cpu_seconds
    )


def _counted(samples: int, mean_length: float) -> dict[str, float]:
    """Samples of a step, and their tokens: every one is trained."""
    tokens = samples * mean_length
    return {"samples": samples, "sampled_tokens": tokens, "trained_tokens": tokens}


def _launcher(processes: int) -> list[str]:
    """The training module, alone or as torchrun starts it on so many processes, which accelerate joins over gloo.

    ``accelerate launch --cpu`` starts a single one where no MPI is installed, whatever number it is given.
    """
    module = ["-m", "benchmarks.peers.contenders.trl_training"]
    if processes == 1:
        return module
    return ["-m", "torch.distributed.run", "--standalone", "--nproc-per-node", str(processes), *module]


def _rows(file: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in file.read_text().splitlines()] if file.exists() else []
