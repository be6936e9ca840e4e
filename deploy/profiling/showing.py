"""A profile and its fits as text. Pure."""

from collections.abc import Iterator, Sequence

from deploy.profiling.fitting import Fitted
from deploy.profiling.profiler import Profiled
from schemas.profiles.profile import DeviceProfile


def lines(profiled: Profiled) -> Iterator[str]:
    """What the terminal shows."""
    profile = profiled.profile
    yield f"{profile.engine} with {profile.model} on {profile.device}"
    yield from _fits(profiled.fitted)
    yield from _summary(profile)


def _fits(fitted: Sequence[Fitted]) -> Iterator[str]:
    if not fitted:
        return
    width = max(len(one.what) for one in fitted)
    yield f"{'':{width}}  {'measured':>11}  {'fitted':>11}  {'error':>7}"
    for one in fitted:
        yield f"{one.what:{width}}  {_ms(one.measured_s)}  {_ms(one.fitted_s)}  {one.error:7.1%}"


def _summary(profile: DeviceProfile) -> Iterator[str]:
    decode, training = profile.decode, profile.training
    if decode.table:
        yield "decode step by batch: " + ", ".join(f"{batch}: {1e3 * value:.2f} ms" for batch, value in decode.table)
    else:
        yield f"decode step: {1e3 * decode.step_s:.2f} ms x (1 + batch / {decode.batch_scale:g})"
    yield (
        f"context {1e9 * decode.context_s_per_token:.2f} ns a token, prefill "
        f"{1e6 * decode.prefill_s_per_token:.2f} us a token, adoption {1e3 * decode.adopt_s:.1f} ms"
    )
    yield (
        f"training {1e6 * training.forward_backward_s_per_token:.2f} us a token + "
        f"{1e9 * training.forward_backward_s_per_squared_token:.3f} ns a squared token + "
        f"{1e3 * training.forward_backward_s_per_micro_batch:.2f} ms a micro-batch, optimizer "
        f"{1e3 * training.optimizer_step_s:.2f} ms, export {1e3 * training.export_s:.1f} ms"
    )
    yield f"weights from store to engine {1e3 * profile.weight_transfer_s:.1f} ms"


def _ms(seconds: float) -> str:
    return f"{1e3 * seconds:8.3f} ms"
