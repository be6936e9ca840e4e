"""How our processes look for garbage. Knows nothing of what they do."""

import gc


def settle_collector() -> None:
    """Call once everything is imported and built.

    What is there now stays for good and need not be looked at again; and thousands of small messages alive at once
    are no sign of cycles, so looking starts later. Worth a sixth of the time of decoding trajectories.
    """
    gc.collect()
    gc.freeze()
    gc.set_threshold(50_000, 10, 10)
