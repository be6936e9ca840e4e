"""A loop with one partition per length bucket, for tests that name partitions by their bucket."""

from typing import ClassVar

from streamrl.schemas.settings import LoopSettings


class OneShardLoop(LoopSettings):
    """``[loop]`` with one shard."""

    shards: ClassVar[int] = 1
