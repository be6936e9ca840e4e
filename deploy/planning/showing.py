"""Choices as text: a line for each mode, and the settings of the best. Pure."""

from collections.abc import Iterator, Sequence

from deploy.planning.planner import Choice, Demand, best_of

HEAD = (
    f"{'mode':17} {'gen : train':>11} {'slots':>6} {'stale':>6} {'traj/s':>9} {'tokens/s':>10} {'step s':>9} "
    f"{'gen s':>8} {'train s':>8} {'idle':>6} {'waits s':>8} {'cost/M':>9}"
)


def lines(demand: Demand, choices: Sequence[Choice]) -> Iterator[str]:
    """What the terminal shows."""
    yield from _sites(demand)
    yield HEAD
    for choice in choices:
        yield _row(choice)
    yield from _advice(demand, best_of(choices))


def _sites(demand: Demand) -> Iterator[str]:
    generation, training = demand.generation, demand.training
    named = generation.profile.device if generation.profile else "as configured"
    yield f"{generation.devices} devices ({named})" + (" that generate" if training else "")
    if training is not None:
        named = training.profile.device if training.profile else "as configured"
        link = f", {demand.link_gbps:g} Gbit/s between them" if demand.link_gbps else ""
        yield f"{training.devices} devices ({named}) that train{link}"


def _row(choice: Choice) -> str:
    predicted, split = choice.prediction, choice.split
    ratio = f"{split.workers} : {split.trainers}"
    return (
        f"{choice.mode:17} {ratio:>11} {choice.max_num_seqs:6d} {choice.max_staleness:6d} "
        f"{predicted.trajectories_per_s:9.2f} {predicted.tokens_per_s:10.0f} {predicted.step_s:9.2f} "
        f"{split.generate_s:8.2f} {split.train_s:8.2f} {predicted.workers_idle:6.0%} "
        f"{predicted.wait_for_batch_s:8.2f} {choice.cost:9.2f}"
    )


def _advice(demand: Demand, choice: Choice) -> Iterator[str]:
    yield ""
    yield "# the best with the least staleness"
    yield f"[run]\nworkers = {choice.split.workers}"
    if choice.split.trainers > 1:
        yield f"# and {choice.split.trainers} devices that share each step's micro-batches"
    yield f'[loop]\nmode = "{choice.mode}"'
    if choice.mode == "trajectory_async":
        yield f"max_staleness = {choice.max_staleness}"
    yield f"[generation]\nmax_num_seqs = {choice.max_num_seqs}"
    yield f"[batching]\ntoken_budget = {choice.token_budget}"
    spare = demand.generation.devices - choice.split.workers
    spare += demand.training.devices if demand.training else 0
    if spare > choice.split.trainers:
        yield f"# {spare - choice.split.trainers} devices are not needed"
