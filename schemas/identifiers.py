"""Identifiers. All are readable text, and a retry of the same work always gets the same identifier."""

import re
from typing import NamedTuple

import xxhash

_PLAIN_NAME = re.compile(r"[a-z0-9._-]{1,64}")

WORK_ORDER_PARTITIONS = 64
"""Partitions of the work-orders topic. Each worker reads one; with 64, few workers of a usual fleet share one."""


SERVED_POLICY = "policy"
"""Name of the policy that a run starts with. Topics, directories and keys of its trainer have only the run's name."""
SERVED_ARM = "served"
"""The served policy's arm of a split, as displays and metrics name it. Records leave the name out."""
INSTANCES = "instances"
"""Folder in a run's directory for the directories of attached instances, by name."""
_SCOPE = ".policy."

PARTIAL_PARTITIONS = 16
"""Partitions of the partial-trajectories topic. A worker that continues another's trajectories reads one of them."""


class PolicyVersion(NamedTuple):
    """A set of weights: ``lineage`` counts trainer incarnations, ``number`` the optimizer steps.

    Versions are ordered by lineage first, so that weights orphaned by a trainer crash never win.
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
    """Prefix of a trainer instance's own topics, consumer groups and transactional ids.

    The run's name for the policy that the run starts with; ``<run>.policy.<name>`` for an attached instance.
    """
    return run if policy == SERVED_POLICY else f"{run}{_SCOPE}{policy}"


def parse_scope(scope: str) -> tuple[str, str]:
    """The run and the policy of a scope."""
    run, found, policy = scope.rpartition(_SCOPE)
    return (run, policy) if found and run and policy else (scope, SERVED_POLICY)


def policy_in(scope: str) -> str | None:
    """The policy name in messages of this scope; None for the policy that the run starts with."""
    policy = parse_scope(scope)[1]
    return None if policy == SERVED_POLICY else policy


def named_version(policy: str | None, version: PolicyVersion) -> str:
    """A version for people, prefixed with its policy's name unless that is the policy that the run started with."""
    return f"{version}" if policy in (None, SERVED_POLICY) else f"{policy}/{version}"


def is_plain_name(text: str) -> bool:
    """Whether the text is safe as a run name, worker id or file stem (lower case, digits, ``._-``, 1–64 long)."""
    # Names become folders, and ".." would lead out of the parent folder.
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
    """Name of the group that a trajectory belongs to; empty if the text is no trajectory id."""
    # From the right: a prompt id may contain slashes.
    return trajectory_id.rpartition("/")[0]


def sample_index_of(trajectory_id: str) -> int | None:
    """Index of a trajectory's sample in its group; None if the text is no trajectory id."""
    index = trajectory_id.rpartition("/")[2]
    # There are at most 4096 samples, hence few digits. Only the form that ``make_trajectory_id`` writes is accepted.
    return int(index) if len(index) <= 9 and index.isascii() and index.isdecimal() and "/" in trajectory_id else None


def graders_group(run: str) -> str:
    """The consumer group of a run's graders."""
    return f"{run}.graders"


def partition_of_worker(worker_id: str) -> int:
    """Partition of the work-orders topic that a worker reads.

    Dispatcher and workers must agree on it. In a run, both are always of one version of this project. So the hash may
    change between versions, but never within a run.
    """
    # Not ``hash``, which differs between processes.
    return xxhash.xxh32_intdigest(worker_id.encode()) % WORK_ORDER_PARTITIONS


def partial_partition_of(worker_id: str) -> int:
    """Partition of the partial-trajectories topic that a worker writes; all its records go to this one."""
    return partition_of_worker(worker_id) % PARTIAL_PARTITIONS
