"""How far the reader reads ahead, and how much bad input stops the trainer. No user sets these; tests change them."""

from dataclasses import dataclass

from streamrl.schemas.settings import LoopSettings


@dataclass(frozen=True, slots=True)
class IntakeLimits:
    """Limits of one reader.

    ``max_poll_records``: taken from the bus at once. Reading pauses above ``high_water_bytes`` of trajectories in
    memory, and resumes below ``low_water_bytes``. ``max_consecutive_faults``: records in a row that may be undecodable
    or lack a reward, and prompts that may be refused. Among the last 1000: ``max_undecodable_share`` of the records,
    and ``max_refused_share`` of the prompts. ``max_skipped_groups`` and ``max_skipped_steps``: see ``end_after``.
    """

    max_poll_records: int = 500
    high_water_bytes: int = 512 << 20
    low_water_bytes: int = 256 << 20
    max_consecutive_faults: int = 50
    max_undecodable_share: float = 0.01
    max_refused_share: float = 0.9
    max_skipped_groups: int = 400
    max_skipped_steps: int = 20

    def end_after(self, loop: LoopSettings) -> int:
        """Number of groups skipped in a row that ends the run: generous, since a hard task may have few good groups.

        It also exceeds the groups that one crash can spoil: those admitted at that time.
        """
        steps = self.max_skipped_steps * loop.groups_per_step
        return max(self.max_skipped_groups, steps, 2 * loop.max_groups_in_flight)

    def should_pause(self, paused: bool, held_bytes: int, *, has_ready: bool) -> bool:
        """Whether reading should pause: above the high mark, until below the low one, and only if a group is ready."""
        if not has_ready:
            return False
        return held_bytes >= self.low_water_bytes if paused else held_bytes > self.high_water_bytes


LIMITS = IntakeLimits()
"""The limits of every reader outside of tests."""
