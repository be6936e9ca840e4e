"""What a run without a new step waits for, in words. Pure."""

from collections.abc import Sequence

from streamrl.schemas.reports import Heartbeat, WorkerState


def first_step_waits_for(
    is_ready: bool, workers: Sequence[Heartbeat], sampled: int, wanted: int | None, skipped: int = 0
) -> str:
    """What keeps the first step away, and how far it is.

    ``is_ready``: whether the trainer has written its first weights. ``workers``: the last heartbeats of the living
    ones. ``sampled``: trajectories that wait for the step, of ``wanted``; None: not known. ``skipped``: trajectories
    that will not be trained.
    """
    if not is_ready:
        return "the trainer loads the model and writes its first weights"
    if not workers:
        return "no worker is up"
    ready = [beat for beat in workers if beat.state is not WorkerState.STARTING]
    if not ready:
        return f"no worker has loaded the model yet; loading: {len(workers)}"
    if wanted is not None and sampled >= wanted:
        return f"the trainer has {sampled:,} trajectories and computes the first step"
    have = f"{sampled:,}{'' if wanted is None else f' of {wanted:,}'} trajectories of the first step"
    without = f", {skipped:,} were skipped" if skipped else ""
    running, speed = sum(beat.running for beat in ready), sum(beat.tokens_per_s for beat in ready)
    return f"{have}{without}; {running:,} completions run at {speed:,.0f} tokens/s"


def waiting_for(mode: str, workers: Sequence[Heartbeat], lag: int) -> str:
    """What keeps the next step away.

    ``mode``: of the run, as the coordinator announced it. ``workers``: the last heartbeats of the living ones. ``lag``:
    trajectories on the topic that the trainer has not finished.
    """
    if mode != "run":
        return {"pause": "the run is paused; streamrl resume continues it", "drain": "the run is drained"}[mode]
    if not workers:
        return "no worker is alive; look at their logs, or start one: streamrl worker --run RUN"
    if all(beat.state is WorkerState.STARTING for beat in workers):
        return f"all workers still load the model: {', '.join(beat.worker_id for beat in workers)}"
    if running := sum(beat.running for beat in workers):
        speed = sum(beat.tokens_per_s for beat in workers)
        return f"workers sample {running:,} completions at {speed:,.0f} tokens/s"
    if lag:
        return f"the trainer has {lag:,} trajectories: it computes, or their groups are incomplete"
    return "workers have nothing to sample; look at the logs of dispatcher and trainer"
