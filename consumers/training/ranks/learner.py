"""A learner whose model and optimizer are sharded over ranks, and rank 0's learner, which distributes the work.

Rank 0 decides everything about a step: its micro-batches, credit that sequences share, mini-batches, and whether a
gradient is applied. All ranks make the same calls on the model: ``DealingLearner`` sends each call to the other ranks,
with their own rows, before it makes it. So every algorithm that works on one device works over ranks, and a rank's sums
are like those of any micro-batch. Invariants:
- a_step_does_not_depend_on_the_number_of_ranks: nor on the share of rows that each rank has. It equals the step of one
  rank, except for the order of sums;
- every_rank_makes_the_same_calls: a rank without rows computes a row that has no gradient (``idle_work``).
"""

from collections.abc import Callable, Iterable, Mapping
from dataclasses import fields
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh

from streamrl.consumers.algorithms.losses import BatchTotals
from streamrl.consumers.algorithms.settings import AlgorithmSettings
from streamrl.consumers.algorithms.token_credit import StepTensors
from streamrl.consumers.batching.dealing import deal_rows
from streamrl.consumers.batching.micro_batches import MicroBatch
from streamrl.consumers.training.checkpoints.shards import PiecedTensors
from streamrl.consumers.training.companions import Companions, Critic, open_companions
from streamrl.consumers.training.model import open_policy
from streamrl.consumers.training.optimizer import GuardedAdamW
from streamrl.consumers.training.policy import LearnerPlan
from streamrl.consumers.training.ranks.sharding import (
    ShardedAdamW,
    ShardedScorer,
    gathered,
    layers_of,
    local_rows,
    reshard,
    rows_of,
    send_weights,
    shard,
    write_part,
)
from streamrl.consumers.training.ranks.team import Team
from streamrl.consumers.training.ranks.wire import RankMessage
from streamrl.consumers.training.ranks.work import Work, idle_work, start_arrays, start_tensors, work_of_rows
from streamrl.consumers.training.settings import TrainingSettings
from streamrl.consumers.training.step import PolicyLearner
from streamrl.consumers.training.updates import HeldBatch, UpdateLog
from streamrl.schemas.errors import OutOfMemory, UserError

POLICY, CRITIC = "policy", "critic"


class ShardLearner(PolicyLearner):
    """One rank's learner. All ranks call it in the same order, each with its own rows."""

    def __init__(self, plan: LearnerPlan, model: Any, companions: Companions, mesh: DeviceMesh) -> None:
        self._plan = plan
        self.mesh = mesh
        super().__init__(model, companions, plan.algorithm, plan.training, plan.max_completion_length)
        if companions.critic is not None:
            self._shard_critic(companions.critic)

    def _open_scorer(self, model: Any) -> ShardedScorer:
        return ShardedScorer(model, self._training, self.mesh)

    def _open_optimizer(self) -> GuardedAdamW:
        return self._sharded_optimizer(POLICY, self.model.named_parameters())

    def _sharded_optimizer(self, of: str, named: Iterable[tuple[str, nn.Parameter]]) -> ShardedAdamW:
        return ShardedAdamW(named, self._training, self._training.max_grad_norm, self.mesh)

    def _shard_critic(self, critic: Critic) -> None:
        layers = [] if critic.own_trunk is None else layers_of(critic.own_trunk)
        shard(critic, layers, self._training, self.mesh)
        if critic.own_trunk is None:
            assert isinstance(self._scorer, ShardedScorer)
            critic.states_at = self._scorer.states_at
        critic.optimizer = self._sharded_optimizer(CRITIC, critic.named_parameters())

    def optimizers(self) -> dict[str, ShardedAdamW]:
        """The optimizers by the name of their model: ``POLICY``, and ``CRITIC`` if there is one."""
        found = {POLICY: self._optimizer} | ({} if self.critic is None else {CRITIC: self.critic.optimizer})
        return {of: each for of, each in found.items() if isinstance(each, ShardedAdamW)}

    # Calls that rank 0 makes on all ranks.

    def add_gradient(self, work: Work) -> None:
        """Add the gradient of this rank's rows; the layers' gradients are summed over all ranks.

        Raises:
            UserError: the work does not fit into memory. The other ranks already wait for this one, so all ranks end.
        """
        self._pairs = dict(work.pairs)
        shortage = super()._backward(work.batch, work.mask, work.everything, work.held)
        if shortage is not None:
            raise _fatal(shortage)

    def start_of(self, work: Work) -> StepTensors:
        """The step's start tensors of this rank's rows: values that need no other sequence."""
        with torch.no_grad():
            found = super()._start_tensors(work.batch, work.mask)
        if self.critic is not None:
            reshard(self.critic)
        return found

    @torch.no_grad()
    def logprobs_of(self, work: Work) -> Tensor:
        """The policy's log-probs of this rank's rows, [A, width]."""
        return super()._logprobs_now(work.batch, work.mask, work.everything)

    def take_sums(self) -> dict[str, Any]:
        """The sums besides the gradient since the last call, as plain numbers."""
        sums, self._sums = self._sums, self._no_sums()
        combine = {"_min": torch.min, "_max": torch.max}
        metrics = {
            name: float(combine.get(name[-4:], torch.sum)(torch.stack(values).float()))
            for name, values in sums.metrics.items()
        }
        values = {"loss": float(sums.loss), "value_loss": float(sums.value_loss)}
        return values | {"computed": sums.computed, "metrics": metrics}

    def clear(self, of: str) -> None:
        """Drop the accumulated gradient and the sums."""
        self.optimizers()[of].clear()
        self._sums = self._no_sums()

    def optimizer_tensors(self) -> dict[str, Tensor]:
        """This rank's rows of AdamW's state, and of the critic's weights and state."""
        tensors = self._optimizer.tensors()
        if self.critic is not None:
            prefix, state = self.critic.PREFIX, self.critic.optimizer.tensors()
            tensors |= {f"{prefix}{name}": local_rows(each).cpu() for name, each in self.critic.named_parameters()}
            tensors |= {f"{prefix}{name}": each for name, each in state.items()}
        return tensors

    @torch.no_grad()
    def load_rows(self, tensors: PiecedTensors) -> None:
        """Restore this rank's rows from what any number of ranks wrote."""
        if self.critic is not None:
            for name, parameter in self.critic.named_parameters():
                if (stored := self.critic.PREFIX + name) in tensors:
                    local_rows(parameter).copy_(tensors.rows(stored, *rows_of(parameter, self.mesh)))
        # After the weights, because an offloaded optimizer copies them.
        for of, optimizer in self.optimizers().items():
            optimizer.load_rows(tensors, "" if of == POLICY or self.critic is None else self.critic.PREFIX)

    def write_part(self, directory: Path) -> None:
        """Write this rank's file of the optimizer's state."""
        write_part(directory, self.optimizer_tensors(), self.mesh)

    def gather_critic(self) -> dict[str, Tensor]:
        """The critic's complete weights by name, on the CPU; all ranks must call it."""
        if self.critic is None:
            return {}
        named = self.critic.named_parameters()
        return {f"{self.critic.PREFIX}{name}": gathered(each).cpu().clone() for name, each in named}


class DealingAdamW(ShardedAdamW):
    """Rank 0's optimizer: it makes the other ranks do the same with their rows."""

    def __init__(self, tell: Callable[..., None], of: str, *made_of: Any) -> None:
        super().__init__(*made_of)
        self._tell = tell
        self._of = of

    def scale(self, factor: float) -> float:
        """See ``ShardedAdamW``."""
        self._tell("scale", of=self._of, factor=factor)
        return super().scale(factor)

    def apply(self, norm: float, learning_rate: float) -> None:
        """See ``GuardedAdamW``."""
        self._tell("apply", of=self._of, norm=norm, learning_rate=learning_rate)
        super().apply(norm, learning_rate)

    def clear(self) -> None:
        """See ``ShardedAdamW``."""
        self._tell("clear", of=self._of)
        super().clear()


class DealingLearner(ShardLearner):
    """Rank 0's learner: a ``PolicyLearner`` that computes on all ranks."""

    def __init__(self, team: Team, *made_of: Any) -> None:
        self._team = team
        super().__init__(*made_of)

    def _sharded_optimizer(self, of: str, named: Iterable[tuple[str, nn.Parameter]]) -> ShardedAdamW:
        max_norm = self._training.max_grad_norm
        return DealingAdamW(self._team.tell, of, named, self._training, max_norm, self.mesh)

    def _backward(
        self, batch: MicroBatch, mask: Tensor, active: Tensor, held: HeldBatch | None = None
    ) -> OutOfMemory | None:
        _, own = self._deal_rows("gradient", batch, mask, active, held)
        self.add_gradient(own)
        return None

    def add_gradient(self, work: Work) -> None:
        """See ``ShardLearner``; keeps the pairs of all rows, which are needed afterwards."""
        pairs = self._pairs
        super().add_gradient(work)
        self._pairs = pairs

    def _start_tensors(self, batch: MicroBatch, mask: Tensor) -> StepTensors:
        everything = torch.ones(len(batch.refs), dtype=torch.bool)
        shares, own = self._deal_rows("start", batch, mask, everything, None)
        try:
            found = self.start_of(own)
        except (RuntimeError, MemoryError) as error:
            raise _fatal(self._shortage(error, own.batch, own.everything, gradient_lost=False)) from error
        scores = torch.as_tensor(batch.advantages)
        parts = [found, *(start_tensors(each.arrays, scores, mask) for each in self._team.answers())]
        whole: dict[str, Tensor] = {}
        for name in (each.name for each in fields(StepTensors)[2:]):
            for rows, part in zip(shares, parts, strict=True):
                if (rows_found := getattr(part, name)) is not None and rows:
                    target = whole.setdefault(name, torch.zeros_like(mask))
                    target[rows, : rows_found.shape[1]] = rows_found
        return StepTensors(scores, mask, **whole)

    def _logprobs_now(self, batch: MicroBatch, mask: Tensor, active: Tensor) -> Tensor:
        shares, own = self._deal_rows("logprobs", batch, mask, active, None)
        parts = [self.logprobs_of(own), *(torch.tensor(each.arrays["logprobs"]) for each in self._team.answers())]
        found = torch.zeros_like(mask)
        for rows, part in zip(shares, parts, strict=True):
            if rows:
                found[rows, : part.shape[1]] = part
        return found[active, : int(torch.as_tensor(batch.lengths)[active].max())]

    def _update(
        self,
        log: UpdateLog,
        totals: BatchTotals,
        problem: str,
        reward_deviation: float,
        observe: Callable[[], None],
    ) -> None:
        self._team.tell("sums")
        for answer in self._team.answers():
            self._add_sums(answer.values)
        super()._update(log, totals, problem, reward_deviation, observe)

    def _add_sums(self, values: Mapping[str, Any]) -> None:
        self._sums.loss += values["loss"]
        self._sums.value_loss += values["value_loss"]
        self._sums.computed += values["computed"]
        for name, value in values["metrics"].items():
            self._sums.metrics[name].append(self._sums.loss.new_tensor(value))

    def _deal_rows(
        self, word: str, batch: MicroBatch, mask: Tensor, active: Tensor, held: HeldBatch | None
    ) -> tuple[list[list[int]], Work]:
        """Distribute the active rows over the ranks; returns each rank's row numbers, and rank 0's own work."""
        rows = torch.nonzero(active).squeeze(1).tolist()
        shares = deal_rows(batch, rows, self._team.ranks, self._training.packing)
        work = [
            work_of_rows(batch, mask, share, held, self._pairs) if share else idle_work(is_held=held is not None)
            for share in shares
        ]
        self._team.send_to_each([each.to_message(word) for each in work[1:]])
        return shares, work[0]


def opening_values(plan: LearnerPlan) -> dict[str, Any]:
    """A plan as plain JSON, for ``plan_of`` in another rank, which knows the core's settings but not the features'."""
    model, initial_model = (
        str(Path(each).absolute()) if Path(each).exists() else each for each in (plan.model, plan.initial_model)
    )
    return {
        "model": model,
        "initial_model": initial_model,
        "algorithm": plan.algorithm.model_dump_json(include=set(AlgorithmSettings.model_fields)),
        "training": plan.training.model_dump_json(include=set(TrainingSettings.model_fields)),
        "max_completion_length": plan.max_completion_length,
        "seed": plan.seed,
    }


def plan_of(values: Mapping[str, Any]) -> LearnerPlan:
    """The plan that ``opening_values`` encoded."""
    return LearnerPlan(
        values["model"],
        values["initial_model"],
        AlgorithmSettings.model_validate_json(values["algorithm"]),
        TrainingSettings.model_validate_json(values["training"]),
        values["max_completion_length"],
        values["seed"],
    )


def open_learner(plan: LearnerPlan, mesh: DeviceMesh, make: Callable[..., ShardLearner] = ShardLearner) -> ShardLearner:
    """Load the plan's models and shard them. They are loaded completely on the CPU; only shards go to the device."""
    cpu, training = torch.device("cpu"), plan.training
    torch.manual_seed(plan.seed)  # so that all ranks draw the same weights if the files lack some
    model = open_policy(plan.initial_model, plan.restored, cpu, training)
    companions = open_companions(model, plan.initial_model, plan.algorithm, training)
    return make(plan, model, companions, mesh)


def carry_out(learner: ShardLearner, message: RankMessage) -> RankMessage | None:
    """Do what rank 0's message says, on another rank; returns the answer, None if none is expected."""
    values = message.values
    match message.word:
        case "gradient":
            learner.add_gradient(Work.from_message(message))
        case "start":
            return RankMessage("start", arrays=start_arrays(learner.start_of(Work.from_message(message))))
        case "logprobs":
            return RankMessage("logprobs", arrays={"logprobs": learner.logprobs_of(Work.from_message(message)).numpy()})
        case "sums":
            return RankMessage("sums", learner.take_sums())
        case "scale":
            learner.optimizers()[values["of"]].scale(values["factor"])
        case "apply":
            learner.optimizers()[values["of"]].apply(values["norm"], values["learning_rate"])
        case "clear":
            learner.clear(values["of"])
        case _:
            return _carry_out_on_state(learner, message)
    return None


def _carry_out_on_state(learner: ShardLearner, message: RankMessage) -> RankMessage | None:
    """Do what a message says if it concerns the complete state: gather weights, load, save."""
    values = message.values
    match message.word:
        case "weights":
            send_weights(learner.model, getattr(torch, values["dtype"]))
            learner.gather_critic()
        case "load":
            learner.load_rows(PiecedTensors([Path(path) for path in values["paths"]]))
        case "save":
            return RankMessage("saved", {"problem": _problem_of(lambda: learner.write_part(Path(values["directory"])))})
        case _:
            raise AssertionError(f"rank 0 never sends {message.word!r}")
    return None


def _problem_of(write: Callable[[], None]) -> str:
    try:
        write()
    except Exception as error:  # a full disk fails the checkpoint, but must not end this rank
        return str(error) or type(error).__name__
    return ""


def _fatal(shortage: OutOfMemory) -> UserError:
    # Not an ``OutOfMemory``, for which the trainer splits the micro-batch: the other ranks are in the middle of it.
    return UserError(str(shortage))
