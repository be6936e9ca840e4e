"""Keys and sections that were renamed, by dotted name: loading refuses the old ones and says the new ones."""

RENAMED = {
    "intake": "ingest",
    "batching.launch_share": "batching.fixed_cost_fraction",
    "batching.quadratic_share": "batching.attention_cost_fraction",
    "coordinator.finish_patience_s": "coordinator.finish_timeout_s",
    "dispatch.adoption_patience_s": "dispatch.weight_sync_timeout_s",
    "generation.standstill_s": "generation.fencing_timeout_s",
    "kafka.stall_rebuilds": "kafka.max_client_restarts",
    "lengths.learn_after": "lengths.min_samples",
    "lengths.memory": "lengths.reservoir_size",
    "training.grad_norm_spike": "training.max_grad_norm_ratio",
    "training.max_refused_steps": "training.max_skipped_steps",
}
