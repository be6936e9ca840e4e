"""The keys of the settings tree: known, renamed and removed keys, and suggestions for unknown ones."""

import difflib
from collections.abc import Iterator, Mapping
from functools import cache
from pathlib import Path
from types import NoneType, UnionType
from typing import Annotated, Any, Literal, Union, get_args, get_origin

from pydantic import BaseModel

from streamrl.schemas.secrets import is_secret
from streamrl.schemas.settings import SettingsTable
from streamrl.settings.tree import Settings

Key = tuple[str, ...]
"""``loop.mode`` as ``("loop", "mode")``."""

RENAMED = {
    "intake": "ingest",
    "coordinator.heartbeat_timeout_s": "loop.heartbeat_timeout_s",
    "dispatch.lease_s": "loop.heartbeat_timeout_s",
    "generation.stream_tokens": "generation.partial_trajectories",
}
"""Former names of keys and sections, with the new names. Loading refuses a former name and reports the new one."""

REMOVED = {
    # [algorithm]
    "algorithm.log_ratio_penalty": "always 1e-3 with policy_loss dppo, else 0",
    "algorithm.whiten_advantages": "only ppo, reinforce_plus_plus and reinforce_plus_plus_baseline whiten advantages",
    "algorithm.overlong_factor": "always 1",
    "algorithm.critic.max_grad_norm": "training.max_grad_norm applies to the critic, too",
    "algorithm.preference.label_smoothing": "always 0",
    "algorithm.preference.length_average": "log-probs are always summed, as in the papers",
    "algorithm.selection.keep_best": "without a threshold, training always uses the best sample of each group",
    "algorithm.teacher.kl_coef": "always 1",
    # [batching]
    "batching.lookahead": "always 4 budgets",
    "batching.fixed_cost_fraction": "always 0.03",
    "batching.launch_share": "always 0.03",
    "batching.attention_cost_fraction": "always 0.2",
    "batching.quadratic_share": "always 0.2",
    # [coordinator]
    **dict.fromkeys(
        ("coordinator.finish_timeout_s", "coordinator.finish_patience_s"),
        "after a restart, a finished run always waits 60 s for a trainer that continues it",
    ),
    # [data]
    "data.size": "a pass over generated prompts always has 10,000; evaluation.prompts limits a held-out set",
    # [dispatch]
    "dispatch.adoption_patience_s": "always 5 s",
    "dispatch.log_interval_s": "always 10 s",
    "dispatch.max_attempts": "always 10",
    "dispatch.orders_per_turn": "always 512",
    "dispatch.overcommit": "always 1.25",
    "dispatch.poll_s": "always 0.25 s",
    "dispatch.repack_payback": "always 16",
    "dispatch.weight_sync_timeout_s": "always 5 s",
    # [environments]
    "environments.episodes_per_task": "always loop.num_generations",
    "environments.load_timeout_s": "an environment always has 600 s to load",
    "environments.max_memory_bytes": "an environment's process has no limit of its own; a container can limit it",
    # [evaluation]
    "evaluation.patience_s": "a finished run always waits up to 30 minutes for the last evaluation",
    "evaluation.share": "evaluation always takes at most an eighth of a worker's slots",
    # [gateway]
    "gateway.body_timeout_s": "a request's body must always arrive within 30 s",
    "gateway.max_awaiting_feedback": "the newest 100,000 requests are always kept for feedback",
    "gateway.max_body_bytes": "always 4 MiB",
    "gateway.max_sequences": "always 64 completions in one request",
    "gateway.max_sessions": "always 4096 open sessions",
    "gateway.model_name": "the model's name in requests is always the run's name",
    "gateway.queue_timeout_s": "a request always waits at most 10 s for a slot; gateway.max_queued limits the queue",
    "gateway.reader_timeout_s": "a client that reads nothing is always disconnected after 30 s",
    "gateway.request_timeout_s": "an answer may always take one hour; clients may disconnect earlier",
    "gateway.reward_name": "the reward that clients send is always named feedback",
    "gateway.shutdown_timeout_s": "at shutdown, running requests always have 15 s to finish",
    # [generation]
    "generation.chunk_tokens": "always 32, or less where durable partial trajectories need it",
    "generation.drain_grace_s": "always 10 s",
    "generation.fencing_timeout_s": "always five eighths of loop.heartbeat_timeout_s",
    "generation.fetch_timeout_s": "always 30 s",
    "generation.heartbeat_interval_s": "always an eighth of loop.heartbeat_timeout_s, at most 1 s",
    "generation.max_undelivered": "always 256",
    "generation.partial_chunk_s": "always 2 s",
    "generation.partial_chunk_tokens": "always a 16th of loop.max_completion_length, at most 256",
    "generation.request_slots": "always a quarter of max_num_seqs with gateway.enabled, else 0",
    "generation.standstill_s": "always five eighths of loop.heartbeat_timeout_s",
    # [ingest]
    "ingest.max_poll_records": "always 500",
    "ingest.high_water_bytes": "always 512 MiB",
    "ingest.low_water_bytes": "always 256 MiB",
    "ingest.orphan_lineage": "samples from weights that a crash lost are always used for training",
    "ingest.priority": "set ingest.sampling to absolute_advantage or package.module:function",
    "ingest.other_behaviour": "training uses samples of other policies, with algorithm.importance_sampling_mode",
    "ingest.max_consecutive_poison": "always 50",
    "ingest.max_undecodable_share": "always 1 %",
    "ingest.max_refused_share": "always 90 %",
    "ingest.group_timeout_s": "a group closes when its last sample arrives, or when the dispatcher abandons it",
    # [kafka]
    "kafka.linger_ms": "always 1 ms",
    "kafka.max_batch_bytes": "always 512 KiB",
    "kafka.max_in_flight_bytes": "always 64 MiB",
    "kafka.connect_timeout_ms": "always 4 s",
    "kafka.delivery_timeout_ms": "always twice kafka.request_timeout_ms",
    "kafka.transaction_timeout_ms": "always 10 s",
    "kafka.stall_timeout_ms": "always 20 s",
    "kafka.max_client_restarts": "always 3",
    "kafka.stall_rebuilds": "always 3",
    "kafka.fetch_max_wait_ms": "always 100 ms",
    "kafka.fetch_min_bytes": "always 1",
    "kafka.fetch_max_bytes": "always 32 MiB",
    "kafka.max_partition_fetch_bytes": "always 4 MiB",
    # [lengths]
    "lengths.learn_after": "always 256",
    "lengths.memory": "always 8192",
    "lengths.min_observations": "always 32",
    "lengths.min_samples": "always 256",
    "lengths.prior_fraction": "always 0.5",
    "lengths.quantile": "always 0.9",
    "lengths.refit_every": "always 4096",
    "lengths.refit_seconds": "always 20 s",
    "lengths.reservoir_size": "always 8192",
    "lengths.trace_noise": "set prediction_noise in [emulation.lengths] instead",
    "lengths.window": "always 512",
    # [loop]
    "loop.shards": "always 2",
    # [metrics]
    "metrics.lag_interval_s": "consumer lag is always read from the broker every 10 s",
    # [relay]
    "relay.keep_versions": "always 2",
    "relay.lease_s": "always 30 s",
    "relay.heartbeat_interval_s": "always 1 s",
    "relay.timeout_s": "always 5 s",
    # [rewards]
    "rewards.grading_attempts": "a failing function is always called three times",
    **dict.fromkeys(
        ("rewards.judge_pattern", "rewards.judge_scale"),
        "the judge must answer with SCORE: and a number up to 10; say so in rewards.judge_prompt",
    ),
    "rewards.judge_max_tokens": "always 2048",
    "rewards.judge_key_variable": "the judge's API key is always read from OPENAI_API_KEY",
    "rewards.load_timeout_s": "a function always has 600 s to load",
    **dict.fromkeys(
        ("rewards.max_file_bytes", "rewards.max_open_files"), "always 16 GiB for a file, and 4096 open files"
    ),
    # [run]
    **dict.fromkeys(
        ("run.log_max_bytes", "run.log_backup_count"), "a log is always rotated at 32 MiB, and 3 older ones are kept"
    ),
    "run.shutdown_grace_s": "processes always have 120 s to exit; a second Ctrl-C kills them",
    "run.watchdog_s": "a process without progress always exits after 600 s, and is restarted",
    # [scaling]
    "scaling": "a worker leaves if, for 3 steps, generation without it would take 15 % less time than training",
    # [sender]
    "sender.timeout_s": "always 60 s",
    # [telemetry]
    "telemetry.endpoint": "OpenTelemetry's variable OTEL_EXPORTER_OTLP_ENDPOINT names the collector",
    "telemetry.sample_ratio": "OpenTelemetry's variable OTEL_TRACES_SAMPLER_ARG gives the share of traces",
    # [training]
    "training.adam_epsilon": "always 1e-8",
    "training.on_checkpoint_failure": "the trainer always exits if a checkpoint cannot be written",
    "training.announce": "step reports are always sent in transactions",
    "training.tensor_digests": "step reports always contain checksums of all weights",
    "training.max_grad_norm_ratio": "always 100",
    "training.grad_norm_spike": "always 100",
    "training.max_skipped_steps": "always 20",
    "training.max_refused_steps": "always 20",
    "training.takeover_after_s": "always 4 s",
}
"""Removed keys and sections, each with the behaviour that replaced it."""

GROUPS = "loop.groups_per_step (prompts per step, over all devices)"
COMPLETION = "loop.max_completion_length"
IN_OTHER_LIBRARIES = {
    # batch sizes
    **dict.fromkeys(("batch_size", "rollout_batch_size", "train_batch_size", "gen_batch_size"), GROUPS),
    **dict.fromkeys(("per_device_train_batch_size", "generation_batch_size", "prompts_per_batch"), GROUPS),
    **dict.fromkeys(
        ("rollouts_per_example", "n_samples_per_prompt", "group_size", "n", "num_rollouts", "attempts"),
        "loop.num_generations",
    ),
    "gradient_accumulation_steps": "batching.token_budget (tokens of a micro-batch)",
    **dict.fromkeys(
        ("micro_batch_size", "micro_train_batch_size", "ppo_micro_batch_size_per_gpu"), "batching.token_budget"
    ),
    **dict.fromkeys(("ppo_max_token_len_per_gpu", "max_tokens_per_gpu", "seq_length"), "batching.token_budget"),
    # lengths and sampling
    **dict.fromkeys(
        ("max_tokens", "max_response_length", "max_new_tokens", "generate_max_len", "max_completion_tokens"), COMPLETION
    ),
    **dict.fromkeys(("prompt_max_len", "max_prompt_tokens"), "loop.max_prompt_length"),
    **dict.fromkeys(("seq_len", "max_seq_len", "max_length"), "loop.max_prompt_length and " + COMPLETION),
    **dict.fromkeys(("stop_strings", "stop_words"), "loop.stop"),
    "generation_kwargs": "loop.stop and loop.include_stop_str_in_output",
    # staleness
    **dict.fromkeys(("max_off_policy_steps", "max_async_level", "max_off_policy_threshold"), "loop.max_staleness"),
    **dict.fromkeys(
        ("staleness_threshold", "async_level", "max_lag", "max_trajectory_age_steps"), "loop.max_staleness"
    ),
    # optimizer and schedule
    **dict.fromkeys(("lr", "actor_learning_rate"), "training.learning_rate"),
    **dict.fromkeys(("lr_scheduler_type", "lr_scheduler", "lr_warmup_type"), "training.lr_schedule"),
    **dict.fromkeys(("lr_warmup_steps", "num_warmup_steps", "warmup_ratio"), "training.warmup_steps"),
    **dict.fromkeys(("max_norm", "clip_grad", "grad_clip"), "training.max_grad_norm"),
    **dict.fromkeys(("total_training_steps", "num_train_steps", "num_steps", "total_steps"), "training.max_steps"),
    **dict.fromkeys(("save_steps", "save_freq", "save_interval", "save_every"), "training.checkpoint_every"),
    **dict.fromkeys(("save_total_limit", "max_ckpt_num", "max_actor_ckpt_to_keep"), "training.keep_checkpoints"),
    **dict.fromkeys(("bf16", "fp16", "param_dtype"), 'training.dtype (such as "bfloat16")'),
    **dict.fromkeys(
        ("enable_gradient_checkpointing", "activation_checkpointing", "ac"), "training.gradient_checkpointing"
    ),
    **dict.fromkeys(
        ("use_remove_padding", "remove_padding", "packing_samples", "padding_free", "sequence_packing"),
        'training.packing (such as "varlen")',
    ),
    **dict.fromkeys(("use_prefix_grouper", "enable_tree_training"), 'training.packing (such as "shared")'),
    **dict.fromkeys(("attn", "attention_implementation"), "training.attn_implementation"),
    "model_init_kwargs": "training.dtype and training.attn_implementation",
    **dict.fromkeys(
        ("optim_cpu_offload", "optimizer_cpu_offload", "adam_offload", "offload_optimizer"),
        "training.optimizer_offload",
    ),
    "adam_beta_1": "training.adam_beta1",
    "adam_beta_2": "training.adam_beta2",
    **dict.fromkeys(("lora_rank", "lora_r", "use_peft", "peft_config"), "training.lora.rank"),
    "lora_alpha": "training.lora.alpha",
    "lora_target_modules": "training.lora.target_modules",
    **dict.fromkeys(("eval_steps", "test_freq", "eval_interval", "eval_strategy", "eval_every"), "evaluation.every"),
    **dict.fromkeys(("eval_dataset", "val_files", "val_data"), "evaluation.data"),
    # the loss
    **dict.fromkeys(("kl_coef", "kl_loss_coef", "init_kl_coef", "kl_tau"), "algorithm.beta"),
    **dict.fromkeys(
        ("clip_ratio", "cliprange", "clip_ratio_low", "eps_clip", "epsilon_low", "eps_clip_low"), "algorithm.epsilon"
    ),
    **dict.fromkeys(("clip_ratio_high", "eps_clip_high"), "algorithm.epsilon_high"),
    **dict.fromkeys(("policy_loss_type", "loss_mode"), "algorithm.policy_loss"),
    "importance_sampling_level": 'algorithm.name (such as "gspo")',
    "loss_agg_mode": "algorithm.loss_type",
    "kl_loss_type": "algorithm.kl_estimator",
    "use_kl_in_reward": "algorithm.kl_in_reward",
    **dict.fromkeys(("adv_estimator", "advantage_estimator"), "algorithm.name"),
    **dict.fromkeys(
        ("vllm_importance_sampling_cap", "vllm_importance_sampling_clip_max", "tis_imp_ratio_cap", "delta"),
        "algorithm.importance_sampling_cap",
    ),
    "vllm_importance_sampling_clip_min": "algorithm.importance_sampling_floor",
    **dict.fromkeys(("vllm_importance_sampling_mode", "rollout_correction"), "algorithm.importance_sampling_mode"),
    **dict.fromkeys(
        ("dynamic_filtering", "filter_groups", "online_difficulty_filtering"), "algorithm.dynamic_sampling"
    ),
    **dict.fromkeys(("ppo_epochs", "num_ppo_epochs", "max_epochs", "num_epochs_per_batch"), "algorithm.num_iterations"),
    **dict.fromkeys(("steps_per_generation", "ppo_mini_batch_size", "ppo_n_minibatches"), "algorithm.num_mini_batches"),
    **dict.fromkeys(("gae_lambda", "lambd"), "algorithm.critic.lam"),
    "critic_learning_rate": "algorithm.critic.learning_rate",
    "value_clip": "algorithm.critic.cliprange_value",
    "teacher_model_name_or_path": "algorithm.teacher.path",
    # model, data, rewards
    **dict.fromkeys(("model_name_or_path", "pretrain", "model_id", "model.name"), "model.path"),
    **dict.fromkeys(("train_files", "train_dataset", "dataset_name", "prompt_data"), "data.path"),
    **dict.fromkeys(("input_key", "prompt_key"), "data.prompt_column"),
    **dict.fromkeys(("label_key", "answer_key"), "data.answer_column"),
    "apply_chat_template": "data.conversational",
    "apply_chat_template_kwargs": "data.chat_template_kwargs",
    **dict.fromkeys(
        ("reward_funcs", "custom_reward_function", "remote_rm_url", "reward_function"), "rewards.functions"
    ),
    "reward_weights": "rewards.weights",
    # engines and processes
    **dict.fromkeys(("vllm_gpu_memory_utilization", "gpu_memory_util"), "generation.gpu_memory_utilization"),
    **dict.fromkeys(
        ("vllm_tensor_parallel_size", "tensor_model_parallel_size", "tp"), "generation.tensor_parallel_size"
    ),
    **dict.fromkeys(("vllm_data_parallel_size", "dp"), "generation.data_parallel_size"),
    **dict.fromkeys(("vllm_max_model_length", "max_model_length"), "generation.max_model_len"),
    **dict.fromkeys(("use_vllm", "rollout_backend", "inference_backend"), 'generation.engine (such as "vllm")'),
    **dict.fromkeys(("n_gpus_per_node", "num_train_workers", "nproc_per_node"), "training.ranks"),
    **dict.fromkeys(("vllm_num_engines", "num_rollout_workers", "num_infer_workers"), "run.workers"),
    # the run
    **dict.fromkeys(("output_dir", "save_path", "default_local_dir", "ckpt_path"), "run.directory"),
    **dict.fromkeys(("run_name", "experiment_name", "wandb_run_name"), "run.name"),
    **dict.fromkeys(("report_to", "logger", "use_wandb", "use_tensorboard"), "tracking.to"),
    **dict.fromkeys(("project_name", "wandb_project"), "tracking.project"),
}
"""Names of settings in TRL, verl, prime-rl and OpenRLHF, with or without their section, and the names here."""

WITHOUT_COUNTERPART = {
    **dict.fromkeys(("num_train_epochs", "total_epochs", "num_episodes"), "a run lasts training.max_steps steps"),
    **dict.fromkeys(
        ("nnodes", "deepspeed", "zero_stage", "fsdp_config"),
        "a trainer runs on one machine and always shards the model over its devices (training.ranks)",
    ),
    **dict.fromkeys(("logging_steps", "log_interval"), "every step is logged"),
    "use_dynamic_bsz": "micro-batches are always cut by tokens (batching.token_budget)",
    "token_batch_size": "a step is counted in prompts (loop.groups_per_step)",
}
"""Settings of other libraries that have no counterpart here, each with the reason."""
SECTIONS_ELSEWHERE = {
    **dict.fromkeys(("actor_rollout_ref", "actor", "rollout", "critic", "reward_model"), "verl"),
    **dict.fromkeys(("orchestrator", "inference", "ckpt"), "prime-rl"),
    "trainer": "verl or prime-rl",
}
"""Sections in the configurations of other libraries, with the library."""


def known_keys(model: type[BaseModel] = Settings, prefix: str = "", *, in_tables: bool = False) -> Iterator[str]:
    """The dotted keys of all settings, such as ``loop.mode``; a table such as ``emulation.decode`` is one key.

    ``in_tables``: yield the fields of a table instead of the table.
    """
    for name, field in model.model_fields.items():
        section = _section(field.annotation)
        if section and (in_tables or not issubclass(section, SettingsTable)):
            yield from known_keys(section, f"{prefix}{name}.", in_tables=in_tables)
        else:
            yield f"{prefix}{name}"


@cache
def secret_keys() -> frozenset[Key]:
    """The settings whose values must not be displayed or written."""
    return frozenset(_secret_keys(Settings, ()))


def _secret_keys(model: type[BaseModel], section: Key) -> Iterator[Key]:
    for name, field in model.model_fields.items():
        if inner := _section(field.annotation):
            yield from _secret_keys(inner, (*section, name))
        elif is_secret(field.annotation):
            yield (*section, name)


@cache
def takes_only_text(key: Key) -> bool:
    """Whether a setting takes text and no other type, so that ``007`` or ``1e5`` is its text and no number."""
    inner: list[Any] = [Settings]
    for part in key:
        inner = [each for outer in inner for each in _types_at(outer, part)]
    others = [each for each in inner if each is not NoneType]
    return bool(others) and all(isinstance(each, str) or each in (str, Path) for each in others)


def _types_at(outer: Any, part: str) -> list[Any]:
    """The types of a section's setting, or of a table's values."""
    if (section := _section(outer)) is not None:
        return _alternatives(section.model_fields[part].annotation) if part in section.model_fields else []
    return _alternatives(get_args(outer)[1]) if get_origin(outer) in (dict, Mapping) else []


def _alternatives(annotation: Any) -> list[Any]:
    """The members of a union, and the values of a literal; else the type itself."""
    origin = get_origin(annotation)
    if origin is Annotated:
        return _alternatives(get_args(annotation)[0])
    if origin in (Union, UnionType):
        return [each for member in get_args(annotation) for each in _alternatives(member)]
    return list(get_args(annotation)) if origin is Literal else [annotation]


def keys_in(section: Key) -> list[str]:
    """The names of a section's settings or of a table's fields. Empty if the key is neither a section nor a table."""
    model: type[BaseModel] | None = Settings
    for part in section:
        field = model.model_fields.get(part) if model else None
        model = _section(field.annotation) if field else None
    return sorted(model.model_fields) if model else []


def suggestion(location: Key) -> str:
    """The end of an error message about an unknown key: what the user probably meant.

    It suggests the counterpart of another library's setting, the same name in another section, or a similar name.
    Without a suggestion, it lists the section's names.
    """
    *parents, wrong = location
    siblings = keys_in(tuple(parents))
    prefix = "".join(f"{part}." for part in parents)
    if (why := WITHOUT_COUNTERPART.get(wrong)) is not None:
        return f"; StreamRL has no such setting: {why}"
    if not parents and wrong in SECTIONS_ELSEWHERE:
        page = f"docs/moving.md lists the counterparts of {SECTIONS_ELSEWHERE[wrong]}'s settings"
        return f"; the sections are {', '.join(keys_in(()))}; {page}"
    right = IN_OTHER_LIBRARIES.get(prefix + wrong) or IN_OTHER_LIBRARIES.get(wrong) or _similar(wrong, prefix, siblings)
    return f"; did you mean {right}?" if right else f"; known ones are {', '.join(siblings)}"


def _similar(wrong: str, prefix: str, siblings: list[str]) -> str | None:
    by_leaf: dict[str, list[str]] = {}
    for key in known_keys(in_tables=True):
        by_leaf.setdefault(key.rpartition(".")[2], []).append(key)
    # A name in several sections is ambiguous, unless only one of them is a top-level section.
    same = by_leaf.get(wrong, [])
    if len(outer := [key for key in same if key.count(".") == 1] or same) == 1:
        return outer[0]
    # Cutoffs of difflib's similarity ratio. In the same section, 0.5 is enough. In other sections the names must be
    # nearly equal, because about 240 names could be confused.
    if close := difflib.get_close_matches(wrong, siblings, n=1, cutoff=0.5):
        return prefix + close[0]
    elsewhere = difflib.get_close_matches(wrong, {**by_leaf, **IN_OTHER_LIBRARIES}, n=1, cutoff=0.8)
    if elsewhere and not same:
        return IN_OTHER_LIBRARIES.get(elsewhere[0]) or by_leaf[elsewhere[0]][0]
    return None


def _section(annotation: Any) -> type[BaseModel] | None:
    return annotation if isinstance(annotation, type) and issubclass(annotation, BaseModel) else None
