"""Calls of one session, gathered into trajectories of several turns: what was sampled is never tokenised again.

A call continues a segment, the tokens of earlier calls, if its prompt begins with them. Prompts come as text, which may
be tokenised otherwise than it was sampled; so they are compared token by token, and from where they differ on by the
text, special tokens written out. If that begins with the segment's, the segment's own tokens are kept, and only the
rest is added to them, with a loss mask of 0. If it does not, because a chat template or an agent rewrote what was
said, the call begins a segment of its own, and a session of several segments becomes as many trajectories.

Invariants, each with a test of its name:
- what_was_sampled_is_never_tokenised_again: the engine reads a segment's own tokens, and the trajectory has them;
- what_nobody_sampled_is_not_trained: it has a loss mask of 0;
- sessions_are_bounded: by number and by time; what is dropped is counted.
"""

import time
from collections import OrderedDict
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal, NamedTuple

import numpy as np
import structlog
import xxhash

from streamrl.producers.gateway.calls import EncodedPrompt, Reply, RunningCall
from streamrl.producers.gateway.refusals import ApiError, invalid
from streamrl.producers.gateway.requests import ChatCompletionRequest, ChatMessage
from streamrl.producers.gateway.text import ChatTokenizer, chat_token_ids
from streamrl.producers.gateway.tool_calls import ParsedReply
from streamrl.producers.generation.rollout import SampledCompletion
from streamrl.schemas.identifiers import make_group_id, make_trajectory_id
from streamrl.schemas.settings import LoopSettings
from streamrl.schemas.trajectories import MAX_TURNS, FinishReason, Trajectory, TrajectoryPart, Turn

log = structlog.get_logger()

MAX_SEGMENTS = 16
"""Of one session that a call may continue; of more the oldest are continued no more, and trained all the same."""
Standing = Literal["new", "continued", "split"]
"""Of a call in its session: its first, one that goes on behind what was sampled, one whose history was rewritten."""


class _SaidTurn(NamedTuple):
    """A turn of a segment, and how it was answered: by which its message is known again when it comes back."""

    call_id: str
    start: int
    end: int
    content: str
    tool_calls: tuple[tuple[str, str], ...]
    raw_text: str


@dataclass(eq=False)
class Segment:
    """One trajectory in the making: the first call's prompt, and what was sampled and read behind it.

    ``said``: its turns; ``parts``: who sampled from which token on.
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
        """All of it, the prompt first."""
        return [*self.prompt.token_ids, *self.completion.token_ids]

    def append(self, inserted: Sequence[int], reply: Reply) -> tuple[int, int]:
        """Append what a call read behind the segment, and what it sampled then; where that is."""
        completion, sampled = self.completion, reply.sampled
        completion.token_ids.extend(inserted)
        completion.logprobs.extend([0.0] * len(inserted))
        start = len(completion.token_ids)
        for worker_id, at in reply.sequence.parts:
            if not self.parts or self.parts[-1].worker_id != worker_id:
                self.parts.append(TrajectoryPart(worker_id=worker_id, attempt=0, start=start + at if self.parts else 0))
        # Spans tile the completion: what was read counts to the weights that read it.
        completion.append(sampled)
        self.predicted += reply.estimate.median
        self.started_at = self.started_at or reply.started_at
        self.finished_at = reply.finished_at
        return start, len(completion.token_ids)


@dataclass(eq=False)
class Session:
    """One conversation of a key's. ``id``: of its trajectories, since a name may be used again when it has ended."""

    name: str
    key: str
    id: str
    segments: list[Segment] = field(default_factory=list)
    used_at: float = 0.0
    calls: int = 0


@dataclass(frozen=True)
class SessionTurn:
    """Where a call stands. ``segment``: which it continues, of ``known`` tokens then; None: it begins one."""

    session: Session
    standing: Standing
    segment: Segment | None = None
    known: int = 0


class _Candidate(NamedTuple):
    """A segment that a call may continue, as it was at one moment: other calls may add to it meanwhile."""

    segment: Segment
    token_ids: list[int]
    said: list[_SaidTurn]

    @classmethod
    def of(cls, segment: Segment) -> "_Candidate":
        return cls(segment, segment.token_ids, list(segment.said))


class ChatPlace(NamedTuple):
    """Where a conversation's next call stands: behind ``behind``, or at the beginning of a segment.

    ``token_ids``: what is read behind the segment, or the whole prompt.
    """

    behind: _Candidate | None
    token_ids: list[int]


@dataclass
class SessionCounts:
    """Since the start: turns sampled, calls whose history was rewritten, sessions that ended well and that did not."""

    turns: int = 0
    splits: int = 0
    ended: int = 0
    dropped: int = 0


@dataclass
class SessionBook:
    """The open sessions of a gateway, in memory: those of a gateway that ends begin anew, behind what was said."""

    tokenizer: ChatTokenizer
    timeout_s: float
    max_open: int
    reward_name: str
    clock: Callable[[], float] = time.time
    counts: SessionCounts = field(default_factory=SessionCounts)
    _open: "OrderedDict[tuple[str, str], Session]" = field(default_factory=OrderedDict)
    _by_call: dict[str, tuple[Session, Segment, int]] = field(default_factory=dict)
    _opened: int = 0

    def __len__(self) -> int:
        return len(self._open)

    def of(self, key: str, name: str) -> Session:
        """A key's session of that name, opened if it is not."""
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
        """The prompt of a conversation's next call, and where it stands.

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
            told = request.model_copy(update={"messages": _as_sampled(request.messages, candidate.said)})
            inserted = self._inserted(candidate, chat_token_ids(self.tokenizer, told))
            if inserted is not None:
                return ChatPlace(candidate, inserted)
        return ChatPlace(None, list(chat_token_ids(self.tokenizer, request)))

    def enter(self, session: Session, place: ChatPlace, text: str) -> tuple[EncodedPrompt, SessionTurn]:
        """Note a call at its place: its prompt, and its turn."""
        if place.behind is None:
            return EncodedPrompt(text, place.token_ids), self._begun(session)
        return self._continued(session, place.behind, place.token_ids, text)

    def text_turn(
        self, session: Session, prompt: EncodedPrompt, temperature: float
    ) -> tuple[EncodedPrompt, SessionTurn]:
        """The same of a text, or of token ids."""
        for candidate in self.candidates(session, temperature):
            if (inserted := self._inserted(candidate, prompt.token_ids)) is not None:
                return self._continued(session, candidate, inserted, prompt.text)
        return prompt, self._begun(session)

    def candidates(self, session: Session, temperature: float) -> Iterator[_Candidate]:
        """What a call may continue, the longest first; at another temperature it is no part of the same trajectory."""
        found = [one for one in session.segments[-MAX_SEGMENTS:] if one.temperature == temperature]
        yield from map(
            _Candidate.of,
            sorted((one for one in found if len(one.said) < MAX_TURNS), key=lambda one: -len(one.completion.token_ids)),
        )

    def _continued(
        self, session: Session, behind: _Candidate, inserted: Sequence[int], text: str
    ) -> tuple[EncodedPrompt, SessionTurn]:
        # Of the moment when the place was found: if the segment has grown since, ``record_turn`` begins a new one.
        known = len(behind.token_ids) - len(behind.segment.prompt.token_ids)
        turn = SessionTurn(session, "continued", behind.segment, known)
        session.calls += 1
        return EncodedPrompt(text, [*behind.token_ids, *inserted]), turn

    def _begun(self, session: Session) -> SessionTurn:
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
        return inserted_behind(self.tokenizer, known, token_ids, ends)

    def record_turn(self, running: RunningCall, turn: SessionTurn, answered: ParsedReply) -> Segment | None:
        """A call is over: its one reply is the next turn of the segment that it continued, or the first of a new one.

        ``answered``: what its requester was told. It is a new one, too, if another call has continued the segment
        meanwhile; and nothing comes of it, None, if the session has ended.
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
        """What was sampled as text, without the token that ended it."""
        ended = len(token_ids) and self.tokenizer.is_special(token_ids[-1])
        return self.tokenizer.decode_with_special(token_ids[:-1] if ended else token_ids)

    def reward_turn(self, call_id: str, key: str, reward: float) -> dict[str, Any] | None:
        """Give one call of an open session its reward; what is known of it then, or None if there is no such call.

        Raises:
            ApiError: it has another reward.
        """
        session, segment, number = self._by_call.get(call_id, (None, None, 0))
        if session is None or segment is None or session.key != key:
            return None
        if segment.rewards.setdefault(number, reward) != reward:
            raise ApiError(
                409, "expected the reward that was given before, got another: the first one counts", param="id"
            )
        return {"id": call_id, "object": "feedback", "status": "open", "session": session.name, "rewards": [reward]}

    def ended(
        self, key: str, name: str, reward: float, dataset: str, loop: LoopSettings
    ) -> tuple[str, list[Trajectory]] | None:
        """The id of an open session, and its trajectories with their rewards, to be put into a group; None: none is.

        Each segment has the session's reward, and those of its own turns.

        Raises:
            ApiError: nothing of it can be trained.
        """
        session = self._open.get((key, name))
        if session is None:
            return None
        if not session.segments:
            raise invalid(
                "session",
                "expected a session with a completion that can be trained on, got one without: its calls were greedy, "
                "failed, asked not to be stored, or were held to a format",
            )
        made = [
            self._trajectory(session, segment, reward, dataset, loop, number)
            for number, segment in enumerate(session.segments)
        ]
        return session.id, made

    def close(self, key: str, name: str, session_id: str) -> None:
        """It is kept elsewhere now; its name may be used again."""
        session = self._open.get((key, name))
        if session is not None and session.id == session_id:
            self._forget((key, name))
            self.counts.ended += 1

    def sweep(self) -> None:
        """Drop what nobody has used for too long."""
        old = self.clock() - self.timeout_s
        while self._open:
            name, session = next(iter(self._open.items()))
            if session.used_at >= old:
                return
            self._drop(name)

    def _drop(self, name: tuple[str, str]) -> None:
        log.warning("a session that nobody ended is dropped", session=name[1], key=name[0])
        self._forget(name)
        self.counts.dropped += 1

    def _forget(self, name: tuple[str, str]) -> None:
        for segment in self._open.pop(name).segments:
            for said in segment.said:
                del self._by_call[said.call_id]

    def _trajectory(
        self, session: Session, segment: Segment, reward: float, dataset: str, loop: LoopSettings, number: int
    ) -> Trajectory:
        # Copies: while numpy holds its arrays, a call that is under way could not add to it.
        token_ids, logprobs = (array.copy() for array in segment.completion.arrays())
        mask = np.zeros(len(token_ids), dtype="<u1")
        for said in segment.said:
            mask[said.start : said.end] = 1
        spans = segment.completion.version_spans()
        prompt_id = f"{dataset}/{session.id}"
        group_id = make_group_id(prompt_id, 0)
        given = {place: {self.reward_name: value} for place, value in segment.rewards.items()}
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
            rewards={self.reward_name: reward + sum(segment.rewards.values())},
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
    """The messages, with the assistant's own as they were sampled: a template would write a tool call anew."""
    turns, found = list(said), list[ChatMessage]()
    for message in messages:
        if turns and message.role == "assistant" and _is(message, turns[0]):
            told = {"content": turns.pop(0).raw_text, "tool_calls": None}
            found.append(message.model_copy(update=told))
        else:
            found.append(message)
    return found


def _is(message: ChatMessage, turn: _SaidTurn) -> bool:
    calls = tuple((call.function.name, call.function.arguments) for call in message.tool_calls or ())
    return (message.text, calls) == (turn.content, turn.tool_calls)


def inserted_behind(
    tokenizer: ChatTokenizer, known: Sequence[int], token_ids: Sequence[int], ends: Sequence[int] = ()
) -> list[int] | None:
    """What a prompt adds to tokens that it begins with; None if it does not begin with them.

    ``ends``: places of known tokens that ended a turn and are no text. A template writes them, and a text comes back
    without them; they stay where they were sampled.
    """
    for dropped in dict.fromkeys(((), tuple(ends[-1:]), tuple(ends))):
        view = [token for place, token in enumerate(known) if place not in dropped]
        if (found := _behind(tokenizer, view, token_ids)) is not None:
            return found
    return None


def _behind(tokenizer: ChatTokenizer, known: Sequence[int], token_ids: Sequence[int]) -> list[int] | None:
    """Token by token as far as both are alike; from there on their texts decide."""
    known, token_ids = list(known), list(token_ids)
    alike = 0
    for one, other in zip(known, token_ids, strict=False):
        if one != other:
            break
        alike += 1
    if alike == len(known):
        return token_ids[alike:]
    # A character may be of several tokens: back to where one begins.
    while alike and tokenizer.decode_with_special(known[alike:]).startswith("\ufffd"):
        alike -= 1
    before, text = (tokenizer.decode_with_special(tokens[alike:]) for tokens in (known, token_ids))
    if not text.startswith(before):
        return None
    return _tokens_behind(tokenizer, token_ids[alike:], text, len(before))


def _tokens_behind(tokenizer: ChatTokenizer, token_ids: list[int], text: str, characters: int) -> list[int]:
    """The tokens of a text from a character on: its own, if one of them begins there."""
    low, high = 0, len(token_ids)
    while low < high:  # the first prefix that reaches as far
        middle = (low + high) // 2
        if len(tokenizer.decode_with_special(token_ids[:middle])) < characters:
            low = middle + 1
        else:
            high = middle
    if tokenizer.decode_with_special(token_ids[:low]) == text[:characters]:
        return token_ids[low:]
    return tokenizer.encode_more(text[characters:])
