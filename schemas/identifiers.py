"""Names of things. All are readable text, and a retry of the same work always gets the same name."""

import re
from typing import NamedTuple

import xxhash

_PLAIN_NAME = re.compile(r"[a-z0-9._-]{1,64}")

WORK_ORDER_PARTITIONS = 64
"""Partitions of the work-orders topic. Each worker reads one; with 64, few of a usual fleet share theirs."""


SERVED_POLICY = "policy"
"""Name of the policy that a run begins with: topics, directories and keys of its trainer bear the run's name alone."""
SERVED_ARM = "served"
"""How displays and metrics call the arm of a split that is the served policy's; records say nothing there."""
INSTANCES = "instances"
"""Folder of a run's directory that holds those of attached instances, by name."""
_SCOPE = ".policy."

PARTIAL_PARTITIONS = 16
"""Partitions of the partial-trajectories topic. Whoever goes on with a worker's trajectories reads one of them."""


class PolicyVersion(NamedTuple):
    """A set of weights: ``lineage`` counts trainer incarnations, ``number`` the optimizer steps.

    Ordered by lineage first, so that weights orphaned by a trainer crash never win.
    """

    lineage: int
    number: int

    def __str__(self) -> str:
        return f"{self.lineage}-{self.number}"

    @classmethod
    def parse(cls, text: str) -> "PolicyVersion":
        """Read ``"3-120"``.

        Raises:
            ValueError: the text is not two non-negative integers joined by a dash.
        """
        match = re.fullmatch(r"(\d{1,9})-(\d{1,12})", text)
        if match is None:
            raise ValueError(f"expected a policy version such as '1-20', got {text!r}")
        return cls(int(match[1]), int(match[2]))


def scope_of(run: str, policy: str = SERVED_POLICY) -> str:
    """What an instance of the trainer calls its own: prefix of its topics, groups and transactional ids.

    The run's name for the policy that the run begins with; ``<run>.policy.<name>`` for one that was attached.
    """
    return run if policy == SERVED_POLICY else f"{run}{_SCOPE}{policy}"


def run_and_policy(scope: str) -> tuple[str, str]:
    """The run and the policy that a scope is of."""
    run, found, policy = scope.rpartition(_SCOPE)
    return (run, policy) if found and run and policy else (scope, SERVED_POLICY)


def policy_in(scope: str) -> str | None:
    """The name that messages of this scope carry; none of the policy that the run begins with."""
    policy = run_and_policy(scope)[1]
    return None if policy == SERVED_POLICY else policy


def named_version(policy: str | None, version: PolicyVersion) -> str:
    """A version as people read it: with its policy's name in front, unless that is the one the run began with."""
    return f"{version}" if policy in (None, SERVED_POLICY) else f"{policy}/{version}"


def is_plain_name(text: str) -> bool:
    """Whether the text is safe as a run name, worker id or file stem (lower case, digits, ``._-``, 1–64 long)."""
    # Names become folders, and ".." would lead out of theirs.
    return _PLAIN_NAME.fullmatch(text) is not None and ".." not in text


def make_prompt_id(dataset: str, index: int) -> str:
    """Name of the prompt at a position of a data set."""
    return f"{dataset}/{index}"


def make_group_id(prompt_id: str, data_pass: int) -> str:
    """Name of the group of samples drawn for a prompt in one pass over the data."""
    return f"{prompt_id}/{data_pass}"


def make_trajectory_id(group_id: str, sample_index: int) -> str:
    """Name of one sample of a group; the same for every attempt at it, so that consumers can drop repeats."""
    return f"{group_id}/{sample_index}"


def group_id_of(trajectory_id: str) -> str:
    """Name of the group that a trajectory belongs to; empty where the text is no trajectory id."""
    # From the right: a prompt id has slashes of its own.
    return trajectory_id.rpartition("/")[0]


def sample_index_of(trajectory_id: str) -> int | None:
    """Which sample of its group a trajectory is; none where the text is no trajectory id."""
    index = trajectory_id.rpartition("/")[2]
    # Of 4096 at most, so a few digits; and only as we write them.
    return int(index) if len(index) <= 9 and index.isascii() and index.isdecimal() and "/" in trajectory_id else None


def graders_group(run: str) -> str:
    """The consumer group of a run's graders."""
    return f"{run}.graders"


def partition_of_worker(worker_id: str) -> int:
    """Partition of the work-orders topic that a worker reads.

    Dispatcher and workers must agree on it. Both are always of one version of this project in a run, so the hash may
    change between versions, though never within a run.
    """
    # Not ``hash``, which differs between processes.
    return xxhash.xxh32_intdigest(worker_id.encode()) % WORK_ORDER_PARTITIONS


def partial_partition_of(worker_id: str) -> int:
    """Partition of the partial-trajectories topic that a worker writes: of one worker all is in one place."""
    return partition_of_worker(worker_id) % PARTIAL_PARTITIONS
