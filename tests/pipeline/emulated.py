"""The configuration of a run without a model, and of the one that several tests look at."""

NAME = "emulated-test"
HELD_OUT = (
    "--evaluation.data.held_out.dataset=chain_sum",
    "--evaluation.data.held_out.seed=777",
    "--evaluation.every=2",
    "--evaluation.prompts=6",
    "--evaluation.samples=2",
)
"""Options for an evaluation of steps 0, 2 and 4; each of them, unless it is slower than the steps."""
CONFIG = """
[run]
directory = "{directory}"
name = "{name}"
workers = 2
[data]
dataset = "chain_sum"
[loop]
groups_per_step = 8
num_generations = 4
max_staleness = 1
max_completion_length = 3000
bucket_boundaries = [500, 1000]
[generation]
engine = "emulated"
max_num_seqs = 16
[training]
backend = "emulated"
max_steps = 4
[emulation]
time_scale = 50.0
[emulation.decode]
adopt_s = 0.5
chunk_tokens = 400
[emulation.training]
forward_backward_s_per_token = 1e-4
"""
