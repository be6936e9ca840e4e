"""Gathers the calls of a session into trajectories of several turns, without tokenising sampled text again.

A segment is the tokens of earlier calls. A call continues a segment if its prompt starts with the segment. Prompts
arrive as text, and tokenising it may give other tokens than were sampled. So a prompt and a segment are compared token
by token, and after the first difference by their text, with special tokens written out. If the prompt's text starts
with the segment's, the segment keeps its own tokens. Only the rest of the prompt is added, with a loss mask of 0. If it
does not, because a chat template or an agent rewrote the history, the call starts a new segment. A session of several
segments becomes as many trajectories.

Invariants, each with a test of its name:
- sampled_tokens_are_never_tokenised_again: the engine reads a segment's own tokens, and the trajectory contains them;
- only_sampled_tokens_are_trained: all other tokens have a loss mask of 0;
- sessions_are_bounded: in number and in time; dropped ones are counted.
"""

import time
from collections import OrderedDict
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal, NamedTuple

import numpy as np
import structlog
import xxhash

from streamrl.producers.gateway.calls import FEEDBACK, EncodedPrompt, Reply, RunningCall
from streamrl.producers.gateway.refusals import ApiError, invalid
from streamrl.producers.gateway.requests import ChatCompletionRequest, ChatMessage
from streamrl.producers.gateway.text import ChatTokenizer, chat_token_ids
from streamrl.producers.gateway.tool_calls import ParsedReply
from streamrl.producers.generation.rollout import SampledCompletion
from streamrl.schemas.identifiers import make_group_id, make_trajectory_id
from streamrl.schemas.settings import LoopSettings
from streamrl.schemas.trajectories import MAX_TURNS, FinishReason, Trajectory, TrajectoryPart, Turn

log = structlog.get_logger()

MAX_OPEN = 4096
"""Sessions open at the same time; beyond that those idle longest are dropped, and counted. They live in memory."""
MAX_SEGMENTS = 16
"""Latest segments of a session that a call may continue. Older ones are trained, but no longer continued."""
Standing = Literal["new", "continued", "split"]
"""A call's place in its session: the first call, one that continues a segment, one whose history was rewritten."""


class _SaidTurn(NamedTuple):
    """A turn of a segment and its answer, by which the message is recognised when a later call sends it back."""

    call_id: str
    start: int
    end: int
    content: str
    tool_calls: tuple[tuple[str, str], ...]
    raw_text: str


@dataclass(eq=False)
class Segment:
    """An unfinished trajectory: the first call's prompt, and the tokens that were sampled and read after it.

    ``said``: its turns; ``parts``: the workers that sampled it, each with its first token's index.
    """

    prompt: EncodedPrompt
    temperature: float
    created_at: float
    completion: SampledCompletion = field(default_factory=SampledCompletion)
    said: list[_SaidTurn] = field(default_factory=list)
    parts: list[TrajectoryPart] = field(default_factory=list)
    rewards: dict[int, float] = field(default_factory=dict)
    predicted: int = 0
    started_at: float = 0.0
    finished_at: float = 0.0

    @property
    def token_ids(self) -> list[int]:
        """All tokens, the prompt first."""
        return [*self.prompt.token_ids, *self.completion.token_ids]

    def append(self, inserted: Sequence[int], reply: Reply) -> tuple[int, int]:
        """Append the tokens that a call read after the segment, and those that it sampled; the range of the latter."""
        completion, sampled = self.completion, reply.sampled
        completion.token_ids.extend(inserted)
        completion.logprobs.extend([0.0] * len(inserted))
        start = len(completion.token_ids)
        for worker_id, at in reply.sequence.parts:
            if not self.parts or self.parts[-1].worker_id != worker_id:
                self.parts.append(TrajectoryPart(worker_id=worker_id, attempt=0, start=start + at if self.parts else 0))
        # Spans cover the completion without gaps: read tokens count to the weights that read them.
        completion.append(sampled)
        self.predicted += reply.estimate.median
        self.started_at = self.started_at or reply.started_at
        self.finished_at = reply.finished_at
        return start, len(completion.token_ids)


@dataclass(eq=False)
class Session:
    """One conversation of a key. ``id``: names its trajectories, since ``name`` may be used again after its end."""

    name: str
    key: str
    id: str
    segments: list[Segment] = field(default_factory=list)
    used_at: float = 0.0
    calls: int = 0


@dataclass(frozen=True)
class SessionTurn:
    """A call's place in its session. ``segment``: the segment that it continues; None: it starts one.

    ``known``: tokens of the segment's completion when the call was made.
    """

    session: Session
    standing: Standing
    segment: Segment | None = None
    known: int = 0


class _Candidate(NamedTuple):
    """A snapshot of a segment that a call may continue, since other calls may extend the segment."""

    segment: Segment
    token_ids: list[int]
    said: list[_SaidTurn]

    @classmethod
    def of(cls, segment: Segment) -> "_Candidate":
        return cls(segment, segment.token_ids, list(segment.said))


class ChatPlace(NamedTuple):
    """The place of a conversation's next call: after the segment ``behind``, or, if that is None, in a new segment.

    ``token_ids``: the tokens to read after the segment, or the whole prompt.
    """

    behind: _Candidate | None
    token_ids: list[int]


@dataclass
class SessionCounts:
    """Since the start: turns sampled, calls with a rewritten history, sessions that got a reward, sessions dropped."""

    turns: int = 0
    splits: int = 0
    ended: int = 0
    dropped: int = 0


@dataclass
class SessionBook:
    """The open sessions of a gateway, in memory. After a restart the next call of a session starts a new one, with the
    conversation so far as its prompt.
    """

    tokenizer: ChatTokenizer
    timeout_s: float
    max_open: int = MAX_OPEN
    clock: Callable[[], float] = time.time
    counts: SessionCounts = field(default_factory=SessionCounts)
    _open: "OrderedDict[tuple[str, str], Session]" = field(default_factory=OrderedDict)
    _by_call: dict[str, tuple[Session, Segment, int]] = field(default_factory=dict)
    _opened: int = 0

    def __len__(self) -> int:
        return len(self._open)

    def of(self, key: str, name: str) -> Session:
        """A key's session of that name, which is opened if it is not open."""
        session = self._open.get((key, name))
        if session is None:
            self._opened += 1
            stamp = f"{key}/{name}/{self.clock()}/{self._opened}"
            session = Session(name, key, xxhash.xxh3_128_hexdigest(stamp.encode()))
            self._open[key, name] = session
        session.used_at = self.clock()
        self._open.move_to_end((key, name))
        while len(self._open) > self.max_open:
            self._drop(next(iter(self._open)))
        return session

    def chat_turn(
        self, session: Session, request: ChatCompletionRequest, text: str, temperature: float
    ) -> tuple[EncodedPrompt, SessionTurn]:
        """The prompt of a conversation's next call, and the call's place.

        Raises:
            ApiError: the model's template refuses the messages.
        """
        return self.enter(session, self.find_place(self.candidates(session, temperature), request), text)

    def find_place(self, candidates: Iterable[_Candidate], request: ChatCompletionRequest) -> ChatPlace:
        """The longest candidate that the conversation continues. Changes nothing; may run in a thread.

        Raises:
            ApiError: the model's template refuses the messages.
        """
        for candidate in candidates:
            restored = request.model_copy(update={"messages": _as_sampled(request.messages, candidate.said)})
            inserted = self._inserted(candidate, chat_token_ids(self.tokenizer, restored))
            if inserted is not None:
                return ChatPlace(candidate, inserted)
        return ChatPlace(None, list(chat_token_ids(self.tokenizer, request)))

    def enter(self, session: Session, place: ChatPlace, text: str) -> tuple[EncodedPrompt, SessionTurn]:
        """Enter a call at its place; its prompt and its turn."""
        if place.behind is None:
            return EncodedPrompt(text, place.token_ids), self._new_segment(session)
        return self._continued(session, place.behind, place.token_ids, text)

    def text_turn(
        self, session: Session, prompt: EncodedPrompt, temperature: float
    ) -> tuple[EncodedPrompt, SessionTurn]:
        """Like ``chat_turn``, for a prompt of text or token ids."""
        for candidate in self.candidates(session, temperature):
            if (inserted := self._inserted(candidate, prompt.token_ids)) is not None:
                return self._continued(session, candidate, inserted, prompt.text)
        return prompt, self._new_segment(session)

    def candidates(self, session: Session, temperature: float) -> Iterator[_Candidate]:
        """The segments that a call may continue, the longest first: those with the call's temperature and room for
        another turn.
        """
        found = [one for one in session.segments[-MAX_SEGMENTS:] if one.temperature == temperature]
        yield from map(
            _Candidate.of,
            sorted((one for one in found if len(one.said) < MAX_TURNS), key=lambda one: -len(one.completion.token_ids)),
        )

    def _continued(
        self, session: Session, behind: _Candidate, inserted: Sequence[int], text: str
    ) -> tuple[EncodedPrompt, SessionTurn]:
        # The length when the place was found: if the segment has grown since, ``record_turn`` starts a new one.
        known = len(behind.token_ids) - len(behind.segment.prompt.token_ids)
        turn = SessionTurn(session, "continued", behind.segment, known)
        session.calls += 1
        return EncodedPrompt(text, [*behind.token_ids, *inserted]), turn

    def _new_segment(self, session: Session) -> SessionTurn:
        session.calls += 1
        if session.calls == 1:
            return SessionTurn(session, "new")
        self.counts.splits += 1
        log.info("a session's history was rewritten, its trajectory is split", session=session.name, key=session.key)
        return SessionTurn(session, "split")

    def _inserted(self, candidate: _Candidate, token_ids: Sequence[int]) -> list[int] | None:
        known, prompt = candidate.token_ids, len(candidate.segment.prompt.token_ids)
        ends = [prompt + said.end - 1 for said in candidate.said]
        ends = [place for place in ends if self.tokenizer.is_special(known[place])]
        return tokens_added_after(self.tokenizer, known, token_ids, ends)

    def record_turn(self, running: RunningCall, turn: SessionTurn, answered: ParsedReply) -> Segment | None:
        """Record the one reply of a finished call; the segment that has it now, or None if the session has ended.

        The reply extends the segment that the call continued. It starts a new segment if the call did, or if another
        call has extended that segment in the meantime. ``answered``: the answer that the requester got.
        """
        (reply,), call, session = running.replies, running.call, turn.session
        if self._open.get((session.key, session.name)) is not session or not reply.sampled.token_ids:
            return None
        session.used_at = self.clock()
        segment, inserted = turn.segment, list[int]()
        if segment is not None and len(segment.completion.token_ids) == turn.known:
            inserted = list(reply.prompt.token_ids[len(segment.prompt.token_ids) + turn.known :])
        else:
            segment = Segment(reply.prompt, call.sampling.temperature, call.created_at)
            session.segments.append(segment)
        calls = tuple((one.name, one.arguments) for one in answered.calls)
        raw = self._raw(reply.sampled.token_ids)
        start, end = segment.append(inserted, reply)
        segment.said.append(_SaidTurn(call.public_id, start, end, answered.content, calls, raw))
        self.counts.turns += 1
        self._by_call[call.public_id] = session, segment, len(segment.said) - 1
        return segment

    def _raw(self, token_ids: Sequence[int]) -> str:
        """Sampled tokens as text, without a special token at the end."""
        ended = len(token_ids) and self.tokenizer.is_special(token_ids[-1])
        return self.tokenizer.decode_with_special(token_ids[:-1] if ended else token_ids)

    def reward_turn(self, call_id: str, key: str, reward: float) -> dict[str, Any] | None:
        """Reward one call of an open session; the answer to the feedback, or None if there is no such call.

        Raises:
            ApiError: the call already has another reward.
        """
        session, segment, number = self._by_call.get(call_id, (None, None, 0))
        if session is None or segment is None or session.key != key:
            return None
        if segment.rewards.setdefault(number, reward) != reward:
            raise ApiError(409, "expected the same reward as before, got another: the first one counts", param="id")
        return {"id": call_id, "object": "feedback", "status": "open", "session": session.name, "rewards": [reward]}

    def ended(
        self, key: str, name: str, reward: float, dataset: str, loop: LoopSettings
    ) -> tuple[str, list[Trajectory]] | None:
        """The id of an open session and its trajectories with rewards, to be put into a group; None if it is not open.

        Each segment's reward is the session's plus those of its own turns.

        Raises:
            ApiError: the session has nothing that can be trained on.
        """
        session = self._open.get((key, name))
        if session is None:
            return None
        if not session.segments:
            raise invalid(
                "session",
                "expected a session with a completion that can be trained on, got one without: each of its calls was "
                "greedy, failed, had store false, or had a forced format",
            )
        made = [
            self._trajectory(session, segment, reward, dataset, loop, number)
            for number, segment in enumerate(session.segments)
        ]
        return session.id, made

    def close(self, key: str, name: str, session_id: str) -> None:
        """Forget a session that is stored elsewhere now. Its name may be used again."""
        session = self._open.get((key, name))
        if session is not None and session.id == session_id:
            self._forget((key, name))
            self.counts.ended += 1

    def sweep(self) -> None:
        """Drop the sessions that were idle for too long."""
        old = self.clock() - self.timeout_s
        while self._open:
            name, session = next(iter(self._open.items()))
            if session.used_at >= old:
                return
            self._drop(name)

    def _drop(self, name: tuple[str, str]) -> None:
        log.warning("a session that was never ended is dropped", session=name[1], key=name[0])
        self._forget(name)
        self.counts.dropped += 1

    def _forget(self, name: tuple[str, str]) -> None:
        for segment in self._open.pop(name).segments:
            for said in segment.said:
                del self._by_call[said.call_id]

    def _trajectory(
        self, session: Session, segment: Segment, reward: float, dataset: str, loop: LoopSettings, number: int
    ) -> Trajectory:
        # Copies: while numpy exports the arrays' buffers, a running call could not extend them.
        token_ids, logprobs = (array.copy() for array in segment.completion.arrays())
        mask = np.zeros(len(token_ids), dtype="<u1")
        for said in segment.said:
            mask[said.start : said.end] = 1
        spans = segment.completion.version_spans()
        prompt_id = f"{dataset}/{session.id}"
        group_id = make_group_id(prompt_id, 0)
        given = {place: {FEEDBACK: value} for place, value in segment.rewards.items()}
        return Trajectory(
            trajectory_id=make_trajectory_id(group_id, number),
            group_id=group_id,
            prompt_id=prompt_id,
            dataset=dataset,
            sample_index=number,
            num_generations=len(session.segments),
            prompt_token_ids=np.array(segment.prompt.token_ids, dtype="<i4"),
            token_ids=token_ids,
            logprobs=logprobs,
            loss_mask=mask,
            version_spans=spans,
            finish_reason=segment.completion.finish_reason or FinishReason.STOP,
            prompt_text=segment.prompt.text,
            completion_text=self.tokenizer.decode_with_special(token_ids.tolist()),
            rewards={FEEDBACK: reward + sum(segment.rewards.values())},
            temperature=segment.temperature,
            bucket=loop.bucket_of(sum(said.end - said.start for said in segment.said)),
            predicted_length=max(1, segment.predicted),
            worker_id=segment.parts[-1].worker_id,
            parts=tuple(segment.parts) if len(segment.parts) > 1 else (),
            attempt=0,
            admitted_version=spans[0].version,
            source="request",
            session=session.name,
            turns=tuple(
                Turn(start=said.start, end=said.end, rewards=given.get(place, {}))
                for place, said in enumerate(segment.said)
            ),
            created_at=segment.created_at,
            started_at=segment.started_at,
            finished_at=segment.finished_at,
        )


def _as_sampled(messages: Sequence[ChatMessage], said: Sequence[_SaidTurn]) -> list[ChatMessage]:
    """The messages, with the assistant's text exactly as sampled: a template would write tool calls differently."""
    turns, found = list(said), list[ChatMessage]()
    for message in messages:
        if turns and message.role == "assistant" and _is_answer_of(message, turns[0]):
            sampled = {"content": turns.pop(0).raw_text, "tool_calls": None}
            found.append(message.model_copy(update=sampled))
        else:
            found.append(message)
    return found


def _is_answer_of(message: ChatMessage, turn: _SaidTurn) -> bool:
    calls = tuple((call.function.name, call.function.arguments) for call in message.tool_calls or ())
    return (message.text, calls) == (turn.content, turn.tool_calls)


def tokens_added_after(
    tokenizer: ChatTokenizer, known: Sequence[int], token_ids: Sequence[int], ends: Sequence[int] = ()
) -> list[int] | None:
    """The tokens that a prompt adds after ``known``; None if the prompt does not start with ``known``.

    ``ends``: indices in ``known`` of special tokens that ended a turn. A template writes such tokens, but text comes
    back without them. So the prompt is also compared without the last of them, and without all of them.
    """
    for dropped in dict.fromkeys(((), tuple(ends[-1:]), tuple(ends))):
        view = [token for place, token in enumerate(known) if place not in dropped]
        if (found := _added_tokens(tokenizer, view, token_ids)) is not None:
            return found
    return None


def _added_tokens(tokenizer: ChatTokenizer, known: Sequence[int], token_ids: Sequence[int]) -> list[int] | None:
    """Compares token by token up to the first difference, and by text from there on."""
    known, token_ids = list(known), list(token_ids)
    alike = 0
    for one, other in zip(known, token_ids, strict=False):
        if one != other:
            break
        alike += 1
    if alike == len(known):
        return token_ids[alike:]
    # A character may consist of several tokens: go back to the start of one.
    while alike and tokenizer.decode_with_special(known[alike:]).startswith("\ufffd"):
        alike -= 1
    before, text = (tokenizer.decode_with_special(tokens[alike:]) for tokens in (known, token_ids))
    if not text.startswith(before):
        return None
    return _tokens_after(tokenizer, token_ids[alike:], text, len(before))


def _tokens_after(tokenizer: ChatTokenizer, token_ids: list[int], text: str, characters: int) -> list[int]:
    """The tokens of ``text`` after its first ``characters``: from ``token_ids``, if one of them starts there."""
    low, high = 0, len(token_ids)
    while low < high:  # finds the shortest prefix of that many characters
        middle = (low + high) // 2
        if len(tokenizer.decode_with_special(token_ids[:middle])) < characters:
            low = middle + 1
        else:
            high = middle
    if tokenizer.decode_with_special(token_ids[:low]) == text[:characters]:
        return token_ids[low:]
    return tokenizer.encode_more(text[characters:])
