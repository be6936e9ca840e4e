"""One optimizer step: gradients of micro-batches are summed un-normalised, then scaled, clipped and applied.

The losses divide by a count of sequences or tokens of the whole batch, or by a deviation of all its rewards. These are
known only when the last micro-batch is in. A gradient is linear in its loss, so the division can come last: each
micro-batch adds the gradient of a plain sum, and ``finish_step`` multiplies the total by one number.

This holds while a step is one update and each sequence has its own credit (``Algorithm.is_separable``). Otherwise
micro-batches are held. As they come, only values that need no other sequence are computed: log-probs of the policy, the
reference and the teacher, and the critic's values. ``finish_step`` then computes the credit of the whole batch and
makes ``num_iterations`` x ``num_mini_batches`` updates, each with the sums of its own rows.

Shapes: B rows of S tokens; A of the rows are active. Knows no bus and no files. Invariants:
- accumulated_micro_batches_equal_one_batch: the step does not depend on how its batch was split;
- an_oversized_micro_batch_leaves_the_sums_unchanged: after ``OutOfMemory`` sums and metrics are as before. So is the
  gradient, unless the error says that it is lost: memory may run out when half of the layers have added theirs;
- a_bad_gradient_changes_nothing: NaN or infinity in loss or gradient, or a norm far above the recent ones, leaves
  weights and moments unchanged. Each of several updates is judged separately; a step without any update is not taken.
"""

import gc
from collections import deque
from collections.abc import Callable, Mapping
from dataclasses import replace
from statistics import fmean
from typing import Any

import torch
from torch import Tensor

from streamrl.consumers.algorithms.estimators import SCALE_EPSILON
from streamrl.consumers.algorithms.losses import (
    BatchTotals,
    LossSums,
    TokenBatch,
    denominator,
    preference_losses,
    sequence_scores,
    token_losses,
)
from streamrl.consumers.algorithms.settings import AlgorithmSettings
from streamrl.consumers.algorithms.shelf import algorithm_of
from streamrl.consumers.algorithms.token_credit import PairTerms, StepTensors, terms_by_group, value_losses, whitened
from streamrl.consumers.batching.micro_batches import MicroBatch
from streamrl.consumers.training.adapters import BaseScorer
from streamrl.consumers.training.companions import Companions
from streamrl.consumers.training.model import open_scorer
from streamrl.consumers.training.optimizer import GuardedAdamW, learning_rate_at
from streamrl.consumers.training.ports import StepOutcome
from streamrl.consumers.training.settings import TrainingSettings
from streamrl.consumers.training.updates import (
    HeldBatch,
    HeldRows,
    RowLoss,
    UpdateLog,
    UpdateOutcome,
    UpdateSums,
    critic_metrics,
    mini_batches,
    mismatch_by_spans,
    totals_of,
)
from streamrl.schemas.errors import OutOfMemory
from streamrl.schemas.identifiers import group_id_of

Scorer = Callable[[Tensor, Tensor, Tensor], tuple[Tensor, Tensor]]
"""Maps token ids, mask and temperatures to log-probs and a sum of entropies, as ``CompletionScorer`` does."""
MAX_GRAD_NORM_RATIO = 100.0
"""A gradient with a norm above this many times the recent median is refused: damaged data, not a hard batch."""
MAX_MESSAGE = 300
"""Most characters kept of an allocator's message, which may list all of the device's memory."""


def is_out_of_memory(error: BaseException) -> bool:
    """Whether memory ran out; only CUDA's allocator raises a class of its own."""
    words = ("out of memory", "DefaultCPUAllocator", "CUBLAS_STATUS_ALLOC_FAILED")
    return isinstance(error, torch.OutOfMemoryError | MemoryError) or any(word in str(error) for word in words)


def _turn_rewards(batch: MicroBatch) -> Tensor | None:
    return None if batch.turn_rewards is None else torch.as_tensor(batch.turn_rewards)


class PolicyLearner:
    """Model, optimizer and the gradient being accumulated. Not thread-safe."""

    def __init__(
        self,
        model: Any,
        companions: Companions,
        algorithm: AlgorithmSettings,
        training: TrainingSettings,
        max_completion_length: int,
    ) -> None:
        self.model = model
        self.step = 0
        self.critic = companions.critic
        self.algorithm = algorithm_of(algorithm)
        self._settings = algorithm
        self._training = training
        self._max_completion_length = max_completion_length
        self._scorer = self._open_scorer(model)
        self._reference, self._teacher = (
            None if frozen is None else self._frozen_scorer(frozen)
            for frozen in (companions.reference, companions.teacher)
        )
        self._optimizer = self._open_optimizer()
        self._reset_sums()

    def _frozen_scorer(self, model: Any) -> Scorer:
        return BaseScorer(self._scorer, model) if model is self.model else self._open_scorer(model)

    def _open_scorer(self, model: Any) -> Scorer:
        return open_scorer(model, self._training)

    def _open_optimizer(self) -> GuardedAdamW:
        return GuardedAdamW(self.model.named_parameters(), self._training, self._training.max_grad_norm)

    def _reset_sums(self) -> None:
        self._sequences = 0  # with at least one trained token
        self._tokens = 0  # trained ones, for the denominator
        self._sums = self._no_sums()
        self._held: list[HeldBatch] = []
        self._pairs: dict[str, PairTerms] = {}

    def _no_sums(self) -> UpdateSums:
        nothing = torch.zeros((), device=self.model.device)
        return UpdateSums(nothing, nothing.clone())

    def accumulate(self, batch: MicroBatch) -> None:
        """Add the un-normalised gradient of a micro-batch, or hold it for ``finish_step``.

        Samples whose advantage is 0 have no gradient unless there is a KL term; they count, but are not computed.

        Raises:
            OutOfMemory: it does not fit; see an_oversized_micro_batch_leaves_the_sums_unchanged.
        """
        mask = torch.tensor(batch.loss_mask)  # float32 [B, S]
        mask[:, 0] = 0.0  # no token comes before the first one, to predict it from
        has_tokens = mask.sum(dim=1) > 0  # bool [B]
        active = self._active(batch, has_tokens)
        shortage = None
        if not self.algorithm.is_separable:
            shortage = self._hold(batch, mask, is_computed=bool(active.any()))
        elif active.any():
            shortage = self._backward(batch, mask, active)
        if shortage is not None:
            # Raised here, where no frame of the traceback holds activations. Cached memory is released first: fragments
            # of the failed attempt could keep a smaller micro-batch from fitting.
            self._free_memory()
            raise shortage
        self._sequences += int(has_tokens.sum())
        self._tokens += int(mask.sum())

    def _active(self, batch: MicroBatch, has_tokens: Tensor) -> Tensor:
        """Rows whose gradient is to be computed, bool [B]."""
        settings = self._settings
        has_other_terms = settings.has_own_kl_term or settings.log_ratio_penalty > 0
        if not self.algorithm.has_plain_credit or has_other_terms or self._training.compute_zero_advantage:
            return has_tokens
        return has_tokens & (torch.as_tensor(batch.advantages) != 0)

    def _free_memory(self) -> None:
        if self.model.device.type == "cuda":
            gc.collect()
            torch.cuda.empty_cache()

    def _backward(
        self, batch: MicroBatch, mask: Tensor, active: Tensor, held: HeldBatch | None = None
    ) -> OutOfMemory | None:
        """Add the gradient of the active rows; returns the error if they do not fit into memory."""
        has_gradient = False
        try:
            sums, mask = self._forward(batch, mask, active, held)
            has_gradient = True
            sums.loss.backward()
            value_loss = self._critic_backward(held, active) if held is not None else None
        except (RuntimeError, MemoryError) as error:
            return self._shortage(error, batch, active, gradient_lost=has_gradient)
        self._sums.loss += sums.loss.detach()
        if value_loss is not None:
            self._sums.value_loss += value_loss
        self._sums.computed += int(mask.sum())
        for name, value in sums.metrics.items():
            self._sums.metrics[name].append(value)
        return None

    def _shortage(
        self, error: RuntimeError | MemoryError, batch: MicroBatch, rows: Tensor, *, gradient_lost: bool
    ) -> OutOfMemory:
        if not is_out_of_memory(error):
            raise error
        message = (str(error).strip() or type(error).__name__).splitlines()[0][:MAX_MESSAGE]
        return OutOfMemory(
            f"expected a micro-batch of {int(rows.sum())} samples, {batch.num_tokens} tokens, to fit into "
            f"memory, got: {message}; lower batching.token_budget or set training.gradient_checkpointing",
            gradient_lost=gradient_lost,
        )

    def _forward(
        self, batch: MicroBatch, mask: Tensor, active: Tensor, held: HeldBatch | None
    ) -> tuple[LossSums, Tensor]:
        """Loss and metrics of the active rows as sums over their trained tokens, and the mask of these rows."""
        tokens, entropy = self._token_batch(batch, mask, active, held)
        if self.algorithm.is_pairwise:
            sums = self._pair_sums(tokens, batch, active)
        else:
            sums = token_losses(self._settings, tokens, self.algorithm.surrogate)
        metrics = {**sums.metrics, "entropy": entropy.detach()}
        if batch.versions:
            metrics |= mismatch_by_spans(tokens, [batch.versions[row] for row in active.nonzero().flatten().tolist()])
        if self.algorithm.has_teacher and not self._settings.whitens_advantages:
            metrics["reverse_kl"] = torch.where(tokens.trained, -tokens.token_advantages, 0.0).sum()
        return replace(sums, metrics=metrics), tokens.mask

    def _token_batch(
        self, batch: MicroBatch, mask: Tensor, active: Tensor, held: HeldBatch | None
    ) -> tuple[TokenBatch, Tensor]:
        """The active rows with the policy's log-probs, and the sum of their entropies."""
        rows = self._rows(batch, active)
        input_ids, mask, temperatures = rows(batch.input_ids), rows(mask), rows(batch.temperatures)
        with self._autocast():
            reference = self._frozen(self._reference, input_ids, mask, temperatures) if held is None else None
            teacher = self._frozen(self._teacher, input_ids, mask, temperatures) if held is None else None
            logprobs, entropy = self._scorer(input_ids, mask, temperatures)  # [A, width] in nats, and a sum
        proximal = None
        if held is None:
            turn_rewards = None if batch.turn_rewards is None else rows(batch.turn_rewards)
            scores = rows(batch.advantages)
            start = StepTensors(scores, mask, logprobs.detach(), reference, teacher, turn_rewards=turn_rewards)
            advantages, _ = self.algorithm.token_advantages(start)
        else:
            advantages = rows(held.advantages)
            reference = None if held.start.reference_logprobs is None else rows(held.start.reference_logprobs)
            if self._keeps_proximal and held.start.start_logprobs is not None:
                proximal = rows(held.start.start_logprobs)
        behaviour = rows(batch.behaviour_logprobs)
        return TokenBatch(logprobs, behaviour, advantages, mask, proximal, reference), entropy

    def _rows(self, batch: MicroBatch, active: Tensor) -> Callable[[Any], Tensor]:
        device = self.model.device
        # The longest of the active rows, which may be shorter than the padded micro-batch.
        width = int(torch.as_tensor(batch.lengths)[active].max())

        def rows(array: Any) -> Tensor:
            """[B, S] becomes [A, width], [B] becomes [A]."""
            tensor = torch.as_tensor(array)[active]
            return (tensor[:, :width] if tensor.ndim == 2 else tensor).to(device)

        return rows

    def _autocast(self) -> torch.autocast:
        return torch.autocast(self.model.device.type, torch.bfloat16, enabled=self._training.dtype == "bfloat16")

    @staticmethod
    def _frozen(scorer: Scorer | None, input_ids: Tensor, mask: Tensor, temperatures: Tensor) -> Tensor | None:
        if scorer is None:
            return None
        with torch.no_grad():
            return scorer(input_ids, mask, temperatures)[0]

    # Held micro-batches: the tensors of the step's start, the credit of the whole batch, and the updates.

    @property
    def _keeps_proximal(self) -> bool:
        return self._settings.ratio == "proximal" and self._settings.updates_per_step > 1

    def _hold(self, batch: MicroBatch, mask: Tensor, *, is_computed: bool) -> OutOfMemory | None:
        """Compute the values that need no other sequence; returns the error if these do not fit into memory."""
        everything = torch.ones(len(batch.refs), dtype=torch.bool)
        start = StepTensors(torch.as_tensor(batch.advantages), mask, turn_rewards=_turn_rewards(batch))
        try:
            with torch.no_grad():
                start = self._start_tensors(batch, mask) if is_computed else start
        except (RuntimeError, MemoryError) as error:
            return self._shortage(error, batch, everything, gradient_lost=False)
        self._held.append(HeldBatch(batch, mask, start, torch.zeros_like(mask)))
        return None

    def _start_tensors(self, batch: MicroBatch, mask: Tensor) -> StepTensors:
        device = self.model.device
        inputs = torch.as_tensor(batch.input_ids).to(device), mask.to(device)
        temperatures = torch.as_tensor(batch.temperatures).to(device)
        is_asked = self.algorithm.needs_start_logprobs or self._keeps_proximal
        with self._autocast():
            found = [
                self._frozen(scorer, *inputs, temperatures)
                for scorer in (self._scorer if is_asked else None, self._reference, self._teacher)
            ]
            values = None if self.critic is None else self.critic(*inputs)
        start, reference, teacher, values = (None if each is None else each.float().cpu() for each in (*found, values))
        scores = torch.as_tensor(batch.advantages)
        return StepTensors(scores, mask, start, reference, teacher, values, _turn_rewards(batch))

    def _settle_credit(self) -> dict[str, float]:
        """Set advantages and returns of all held micro-batches; returns metrics of them."""
        masks = [held.mask for held in self._held]
        for held in self._held:
            held.advantages, held.returns = self.algorithm.token_advantages(held.start)
        metrics = critic_metrics(self._held)
        if self._settings.kl_in_reward:
            gaps = [
                (held.start.start_logprobs - held.start.reference_logprobs)[held.mask > 0]
                for held in self._held
                if held.start.start_logprobs is not None and held.start.reference_logprobs is not None
            ]
            metrics["kl"] = float(torch.cat(gaps).mean())
        if self._settings.whitens_advantages:
            for held, advantages in zip(
                self._held, whitened([held.advantages for held in self._held], masks), strict=True
            ):
                held.advantages = advantages
        return metrics

    def _gather(self, parts: list[HeldRows], *, is_first: bool) -> str:
        """Add up the gradient of one update; returns the problem, empty if there is none."""
        if self.algorithm.is_pairwise:
            self._pairs = self._pair_terms(parts, is_first=is_first)
        waiting, done = deque(parts), list[HeldRows]()
        while waiting:
            part = waiting.popleft()
            active = self._active(part.held.batch, part.rows) & part.rows
            if not active.any():
                continue
            shortage = self._backward(part.held.batch, part.held.mask, active, part.held)
            if shortage is None:
                done.append(part)
                continue
            problem, gradient_lost = str(shortage), shortage.gradient_lost
            del shortage
            self._free_memory()
            if int(part.rows.sum()) < 2:
                return problem
            waiting.extendleft(reversed(part.halves()))
            if gradient_lost:
                waiting.extendleft(reversed(done))
                done.clear()
                self._clear_gradients()
                self._sums = self._no_sums()
        return ""

    def _critic_backward(self, held: HeldBatch, active: Tensor) -> Tensor | None:
        if self.critic is None or held.returns is None or held.start.values is None:
            return None
        rows = self._rows(held.batch, active)
        start, returns, mask = rows(held.start.values), rows(held.returns), rows(held.mask)
        with self._autocast():
            values = self.critic(rows(held.batch.input_ids), mask)
        loss = value_losses(values, start, returns, mask, self._settings.critic.cliprange_value)
        loss.backward()
        return loss.detach()

    # Preferences: a pair's rows may be in different micro-batches, so its slope is computed before any gradient.

    def _pair_terms(self, parts: list[HeldRows], *, is_first: bool) -> dict[str, PairTerms]:
        better: dict[str, float] = {}
        worse: dict[str, float] = {}
        for part in parts:
            scores = self._scores_now(part, is_first=is_first)
            names = [name for name, wanted in zip(part.held.groups, part.rows.tolist(), strict=True) if wanted]
            signs = torch.as_tensor(part.held.batch.advantages)[part.rows]
            for name, sign, score in zip(names, signs.tolist(), scores.tolist(), strict=True):
                (better if sign > 0 else worse)[name] = score
        return terms_by_group(self._settings, better, worse)

    @torch.no_grad()
    def _scores_now(self, part: HeldRows, *, is_first: bool) -> Tensor:
        """Scores log pi / ref of the part's rows under the present policy, float64 [A]."""
        held = part.held
        logprobs = held.start.start_logprobs
        if not is_first:
            found = self._logprobs_now(held.batch, held.mask, part.rows)
            logprobs = torch.zeros_like(held.mask)
            logprobs[part.rows, : found.shape[1]] = found
        assert logprobs is not None
        assert held.start.reference_logprobs is not None
        tokens = TokenBatch(
            logprobs[part.rows].double(),
            torch.as_tensor(held.batch.behaviour_logprobs)[part.rows],
            held.advantages[part.rows],
            held.mask[part.rows],
            reference_logprobs=held.start.reference_logprobs[part.rows],
        )
        return sequence_scores(tokens)

    def _logprobs_now(self, batch: MicroBatch, mask: Tensor, active: Tensor) -> Tensor:
        """The policy's log-probs of the active rows, float32 [A, width] on the CPU."""
        rows = self._rows(batch, active)
        with self._autocast():
            return self._scorer(rows(batch.input_ids), rows(mask), rows(batch.temperatures))[0].float().cpu()

    def _pair_sums(self, tokens: TokenBatch, batch: MicroBatch, active: Tensor) -> LossSums:
        refs = [ref for ref, wanted in zip(batch.refs, active.tolist(), strict=True) if wanted]
        signs = torch.as_tensor(batch.advantages)[active].tolist()
        terms = [self._pairs.get(group_id_of(ref.trajectory_id)) for ref in refs]
        slopes = [0.0 if pair is None else sign * pair.slope for pair, sign in zip(terms, signs, strict=True)]
        halves = [0.0 if pair is None else pair.loss / 2 for pair in terms]
        scores = sequence_scores(tokens)
        return preference_losses(scores, scores.new_tensor(slopes), scores.new_tensor(halves), tokens)

    def discard(self) -> None:
        """Drop the accumulated gradient and the held micro-batches."""
        self._clear_gradients()
        self._reset_sums()

    def _clear_gradients(self) -> None:
        self._optimizer.clear()
        if self.critic is not None:
            self.critic.clear()

    def finish_step(self, reward_deviation: float, observe: Callable[[], None] = lambda: None) -> StepOutcome:
        """Normalise, clip and apply the accumulated gradient; ``reward_deviation``: of all rewards of the batch.

        ``observe`` is called when the model holds the scaled gradient of the step's first update.
        """
        totals = BatchTotals(self._sequences, self._tokens)
        if self.algorithm.is_separable:
            log = UpdateLog(totals)
            self._update(log, totals, "", reward_deviation, observe)
        else:
            log = UpdateLog(totals, self._settle_credit() if self._held else {})
            for parts in mini_batches(self._held, self._settings, self.step):
                problem = self._gather(parts, is_first=not log.updates)
                log.pairs.append(self._pairs)
                self._update(log, totals_of(parts), problem, reward_deviation, observe)
            if not log.updates:  # nothing is trained, which is still a step, like a batch without any gradient
                self._update(log, BatchTotals(0, 0), "", reward_deviation, observe)
        metrics = self._metrics(log)
        if log.applied:
            self.step += 1
        self.discard()
        return StepOutcome(bool(log.applied), "" if log.applied else log.problem, metrics)

    def _update(
        self,
        log: UpdateLog,
        totals: BatchTotals,
        problem: str,
        reward_deviation: float,
        observe: Callable[[], None],
    ) -> None:
        """Apply the accumulated gradient, unless there is a problem; then clear it, and note the update in the log."""
        # The loss is the sum of token losses / denominator. With ``scale_rewards="batch"`` the advantages, which were
        # only centred so far, are divided by k = sd + 1e-4 as well. Each token loss is a minimum of multiples of A, so
        # A / k with k > 0 scales it by 1 / k. (A KL term would not scale with it; settings refuse the two together.)
        # So one factor turns the accumulated gradient into that of the loss.
        scale = 1.0 / denominator(self._settings, totals, self._max_completion_length)
        if self._settings.scale_rewards == "batch":
            scale /= reward_deviation + SCALE_EPSILON
        norm = self._optimizer.scale(scale)
        loss = float(self._sums.loss) * scale
        if not log.updates:
            observe()
        problem = problem or self._optimizer.problem(loss, norm, MAX_GRAD_NORM_RATIO)
        critic: tuple[float, float] | None = None
        if self.critic is not None:
            value_scale = 1.0 / max(totals.tokens, 1)
            value_norm, value_loss = self.critic.scale(value_scale), float(self._sums.value_loss) * value_scale
            problem = problem or self.critic.problem(value_loss, value_norm)
            critic = value_loss, value_norm
            if not problem:
                self.critic.take_step(value_norm, self.step)
        if not problem:
            self._optimizer.apply(norm, learning_rate_at(self.step, self._training))
        log.note(UpdateOutcome(loss, norm, critic, problem), self._sums)
        self._clear_gradients()
        self._sums = self._no_sums()

    def _metrics(self, log: UpdateLog) -> dict[str, float]:
        metrics = {
            "loss": fmean(update.loss for update in log.updates),
            "grad_norm": fmean(update.norm for update in log.updates),
            "optim/lr": learning_rate_at(self.step, self._training),
            "tokens/trained": float(log.totals.tokens),
            "tokens/computed": float(log.computed),
        }
        if not self.algorithm.is_separable:
            metrics["optim/updates"] = float(log.applied)
            metrics["optim/updates_skipped"] = float(len(log.updates) - log.applied)
        if critics := [update.critic for update in log.updates if update.critic is not None]:
            losses, norms = zip(*critics, strict=True)
            metrics |= {"critic/loss": fmean(losses), "critic/grad_norm": fmean(norms)}
        metrics |= log.metrics | log.pair_metrics(self._settings.preference.beta)
        return metrics | (log.token_means() if log.sums else {})

    def optimizer_tensors(self) -> dict[str, Tensor]:
        """AdamW's state as ``<parameter>.<moment>``, the recent gradient norms, and the critic's state; on the CPU."""
        return self._optimizer.tensors() | ({} if self.critic is None else self.critic.tensors())

    def load_optimizer_tensors(self, tensors: Mapping[str, Tensor]) -> None:
        """Restore what ``optimizer_tensors`` returned; parameters missing from it start with fresh state."""
        self._optimizer.load(tensors)
        if self.critic is not None:
            self.critic.load(tensors)

    @torch.no_grad()
    def row_losses(self, batch: MicroBatch) -> list[RowLoss]:
        """Each row's share of the sums. The algorithm's credit must need no other sequence."""
        assert self.algorithm.is_separable
        mask = torch.tensor(batch.loss_mask)
        mask[:, 0] = 0.0
        everything = torch.ones(len(batch.refs), dtype=torch.bool)
        tokens, _ = self._token_batch(batch, mask, everything, None)
        found = []
        for number in range(len(batch.refs)):
            row = tokens.row(number)
            sums, count = token_losses(self._settings, row, self.algorithm.surrogate), int(mask[number].sum())
            # The maximum over no tokens is -inf.
            largest = float(sums.metrics["ratio_max"]) if count else 0.0
            found.append(RowLoss(count, float(sums.loss), float(sums.metrics["ratio"]), largest))
        return found
