"""TRL's GRPOTrainer on the plan; runs in TRL's own environment: ``python -m benchmarks.peers.contenders.trl_training``.

Knows nothing of StreamRL. Writes ``saved.jsonl`` and ``steps.jsonl`` (with times of the wall clock) as it goes.
"""

import json
import os
import sys
import time
from pathlib import Path
from typing import Any


def main(plan_file: str) -> None:
    """Train as the JSON plan says."""
    plan = json.loads(Path(plan_file).read_text())
    import torch
    from datasets import Dataset
    from transformers import AutoModelForCausalLM, AutoTokenizer
    from trl import GRPOTrainer

    from benchmarks.peers.task import read_entries, reward

    torch.set_num_threads(plan["trl"]["threads"])
    trainer = GRPOTrainer(
        model=AutoModelForCausalLM.from_pretrained(
            plan["policy"],
            dtype=torch.float32,
            attn_implementation=plan["trl"]["attn_implementation"][plan["hyperparameters"]["dtype"]],
        ),
        processing_class=AutoTokenizer.from_pretrained(plan["policy"], padding_side="left"),
        reward_funcs=reward(plan["answer_pattern"]),
        args=_config(plan),
        train_dataset=Dataset.from_list(read_entries(Path(plan["prompts"]))),
        callbacks=[_recorder(plan)],
    )
    if (found := trainer.accelerator.num_processes) != plan["trl"]["processes"]:
        raise RuntimeError(f"expected {plan['trl']['processes']} processes to train together, got {found}")
    trainer.train()


def _config(plan: dict[str, Any]) -> Any:
    from trl import GRPOConfig

    ours, tuned = plan["hyperparameters"], plan["trl"]
    samples = ours["groups_per_step"] * ours["num_generations"]
    micro_batch = min(tuned["micro_batch"], samples // tuned["processes"])
    in_a_step = samples // (micro_batch * tuned["processes"])
    same = (
        *("num_generations", "max_completion_length", "temperature", "learning_rate", "adam_beta2", "warmup_steps"),
        *("max_grad_norm", "epsilon", "epsilon_high", "beta", "loss_type", "scale_rewards", "max_steps"),
    )
    return GRPOConfig(
        output_dir=plan["output"],
        seed=plan["seed"],
        use_cpu=True,
        # Weights stay in float32; bfloat16 only casts the inputs of matmuls.
        bf16=ours["dtype"] == "bfloat16",
        ddp_backend="gloo" if tuned["processes"] > 1 else None,
        gradient_checkpointing=False,
        per_device_train_batch_size=micro_batch,
        gradient_accumulation_steps=in_a_step,
        steps_per_generation=in_a_step * tuned["optimizer_steps_per_generation"],
        use_transformers_continuous_batching=tuned["continuous_batching"],
        cache_implementation=tuned["cache_implementation"],
        lr_scheduler_type="constant_with_warmup" if ours["warmup_steps"] else "constant",
        save_strategy="no",
        report_to="none",
        logging_steps=1,
        disable_tqdm=True,
        **{name: ours[name] for name in same},
    )


def _recorder(plan: dict[str, Any]) -> Any:
    from transformers import TrainerCallback

    folder = Path(plan["output"])

    class Recorder(TrainerCallback):  # type: ignore[misc]
        """Saves weights with the moment at which they were there; what saving takes is not hidden."""

        def on_step_end(self, args: Any, state: Any, control: Any, model: Any = None, **_: Any) -> None:
            if not state.is_world_process_zero:
                return
            if state.global_step % plan["save_every"] == 0 or state.global_step == state.max_steps:
                weights = folder / f"step_{state.global_step}"
                row = {"step": state.global_step, "time": time.time(), "weights": str(weights)}
                _append(folder / "saved.jsonl", row)
                # Where several processes train, the model is wrapped.
                getattr(model, "module", model).save_pretrained(weights)

        def on_log(self, args: Any, state: Any, control: Any, logs: Any = None, **_: Any) -> None:
            if not state.is_world_process_zero:
                return
            numbers = {name: float(value) for name, value in (logs or {}).items() if isinstance(value, int | float)}
            _append(folder / "steps.jsonl", {"step": state.global_step, "time": time.time(), **numbers})

    return Recorder()


def _append(file: Path, row: dict[str, Any]) -> None:
    with file.open("a") as lines:
        lines.write(json.dumps(row) + os.linesep)


if __name__ == "__main__":
    main(sys.argv[1])
