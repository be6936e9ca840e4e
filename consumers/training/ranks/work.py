"""The rows of a micro-batch that one rank computes, and their encoding as a message to that rank. Knows no model.

The rows belong to a new micro-batch, or to one that waits for the rest of its step (``HeldBatch``). A rank without rows
gets ``idle_work``: one row without trained tokens. So all ranks take part in the same collective operations, and an
idle rank adds a gradient of 0.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, fields
from typing import Any

import numpy as np
import torch
from torch import Tensor

from streamrl.consumers.algorithms.token_credit import PairTerms, StepTensors
from streamrl.consumers.batching.micro_batches import MicroBatch
from streamrl.consumers.training.ranks.wire import Arrays, RankMessage
from streamrl.consumers.training.updates import HeldBatch
from streamrl.schemas.reports import RecordRef

START, CREDIT, RETURNS, MASK = "start.", "credit", "returns", "mask"
_BATCH = ("input_ids", "behaviour_logprobs", "advantages", "lengths", "temperatures")
IDLE_TOKENS = 2
"""Tokens of an idle row. Two is the minimum: the second token is predicted from the first."""


@dataclass(frozen=True)
class Work:
    """A rows for one rank, cut to the width of the longest.

    ``mask``: which tokens are trained, float32 [A, width]. ``held``: the same rows with their tensors from the start of
    the step; None for a new micro-batch. ``pairs``: the loss terms of the rows' pairs, by group.
    """

    batch: MicroBatch
    mask: Tensor
    held: HeldBatch | None = None
    pairs: Mapping[str, PairTerms] = field(default_factory=dict)

    @property
    def everything(self) -> Tensor:
        """A selection of all rows, bool [A]."""
        return torch.ones(len(self.batch.refs), dtype=torch.bool)

    def to_message(self, word: str) -> RankMessage:
        """Encode this work as a message. ``word``: what the rank does with the work."""
        refs = [list(ref) for ref in self.batch.refs]
        pairs = {name: [pair.margin, pair.loss, pair.slope] for name, pair in self.pairs.items()}
        arrays: dict[str, Any] = {name: getattr(self.batch, name) for name in _BATCH}
        arrays[MASK] = self.mask.numpy()
        if self.held is not None:
            arrays |= start_arrays(self.held.start) | {CREDIT: self.held.advantages.numpy()}
            if self.held.returns is not None:
                arrays[RETURNS] = self.held.returns.numpy()
        return RankMessage(word, {"refs": refs, "pairs": pairs, "is_held": self.held is not None}, arrays)

    @classmethod
    def from_message(cls, message: RankMessage) -> "Work":
        """Decode the work in a message that ``to_message`` encoded."""
        # The arrays are copied, because torch warns about memory that is not writable.
        found = {name: np.array(array) for name, array in message.arrays.items()}
        mask = torch.from_numpy(found[MASK])
        rows: dict[str, Any] = {name: found[name] for name in _BATCH}
        batch = MicroBatch(
            loss_mask=found[MASK],
            refs=tuple(RecordRef(*ref) for ref in message.values["refs"]),
            **rows,
        )
        held = None
        if message.values["is_held"]:
            returns = torch.from_numpy(found[RETURNS]) if RETURNS in found else None
            start = start_tensors(found, torch.from_numpy(batch.advantages), mask)
            held = HeldBatch(batch, mask, start, torch.from_numpy(found[CREDIT]), returns)
        pairs = {name: PairTerms(*terms) for name, terms in message.values["pairs"].items()}
        return cls(batch, mask, held, pairs)


def work_of_rows(
    batch: MicroBatch, mask: Tensor, rows: Sequence[int], held: HeldBatch | None, pairs: Mapping[str, PairTerms]
) -> Work:
    """The work for the given rows of a micro-batch, at least one."""
    part, wanted = batch.repacked(rows), list(rows)
    width = part.input_ids.shape[1]

    def cut(tensor: Tensor) -> Tensor:
        return tensor[wanted, :width] if tensor.ndim == 2 else tensor[wanted]

    own = None
    if held is not None:
        known = {field.name: getattr(held.start, field.name) for field in fields(StepTensors)}
        of_rows: dict[str, Any] = {name: None if each is None else cut(each) for name, each in known.items()}
        start = StepTensors(**of_rows)
        returns = None if held.returns is None else cut(held.returns)
        own = HeldBatch(part, cut(mask), start, cut(held.advantages), returns)
    groups = set(own.groups) if own is not None else set()
    return Work(part, cut(mask), own, {name: pairs[name] for name in groups if name in pairs})


def idle_work(*, is_held: bool) -> Work:
    """The work for a rank without rows: one row without trained tokens."""
    nothing = np.zeros((1, IDLE_TOKENS), dtype=np.float32)
    batch = MicroBatch(
        input_ids=np.zeros((1, IDLE_TOKENS), dtype=np.int64),
        loss_mask=nothing,
        behaviour_logprobs=nothing,
        advantages=nothing[:, 0],
        lengths=np.array([IDLE_TOKENS], dtype=np.int64),
        temperatures=np.ones(1, dtype=np.float32),
        refs=(RecordRef("", 0, 0),),
    )
    zeros = torch.zeros(1, IDLE_TOKENS)
    held = None
    if is_held:
        start = StepTensors(zeros[:, 0], zeros, *[zeros] * (len(fields(StepTensors)) - 2))
        held = HeldBatch(batch, zeros, start, zeros, zeros)
    return Work(batch, zeros, held)


def start_arrays(start: StepTensors) -> dict[str, Any]:
    """The tensors from the start of a step as arrays, without scores and mask, which the micro-batch contains."""
    known = {field.name: getattr(start, field.name) for field in fields(StepTensors)[2:]}
    return {START + name: tensor.numpy() for name, tensor in known.items() if tensor is not None}


def start_tensors(arrays: Arrays, scores: Tensor, mask: Tensor) -> StepTensors:
    """The tensors that ``start_arrays`` encoded, together with scores and mask."""
    names = [field.name for field in fields(StepTensors)[2:]]
    found = {name: torch.from_numpy(np.array(arrays[START + name])) for name in names if START + name in arrays}
    return StepTensors(scores, mask, **found)
