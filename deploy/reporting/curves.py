"""The curves of a run as one plotly figure each, in HTML without the library itself."""

from collections.abc import Sequence

import plotly.graph_objects as go

from deploy.observation.state import RunState

CURVES: tuple[tuple[str, tuple[str, ...]], ...] = (
    ("Reward", ("reward", "reward_std")),
    ("Staleness (optimizer steps)", ("off_policy/mean", "off_policy/max")),
    ("Completion length (tokens)", ("completions/mean_length", "completions/max_length")),
    ("Entropy and KL to the sampler", ("entropy", "mismatch_kl/all/mean")),
    ("Gradient norm", ("optim/grad_norm",)),
    ("Time per step (s)", ("time/step", "time/wait_for_batch", "time/forward_backward")),
)
LAG = "kafka/lag/bucket_"


def figures(state: RunState) -> list[str]:
    """HTML fragments, one per curve that has data; they need plotly.js on the page."""
    lag = sorted({key for point in state.steps for key in point.metrics if key.startswith(LAG)})
    wanted = [*CURVES, ("Consumer lag per length bucket (records)", tuple(lag))]
    return [fragment for title, keys in wanted if (fragment := _figure(state, title, keys))]


def _figure(state: RunState, title: str, keys: Sequence[str]) -> str:
    figure = go.Figure()
    for key in keys:
        points = [(point.step, point.metrics[key]) for point in state.steps if key in point.metrics]
        if points:
            steps, values = zip(*points, strict=True)
            figure.add_trace(go.Scatter(x=steps, y=values, name=key, mode="lines"))
    if not figure.data:
        return ""
    figure.update_layout(
        title=title,
        height=320,
        margin={"l": 50, "r": 20, "t": 50, "b": 40},
        template="plotly_white",
        xaxis_title="optimizer step",
        showlegend=True,
        legend={"orientation": "h", "y": 1.12, "x": 1, "xanchor": "right"},
    )
    return str(figure.to_html(full_html=False, include_plotlyjs=False, config={"displaylogo": False}))
