"""Which worker samples a request."""

from streamrl.producers.gateway.balancing import (
    BLOCK_TOKENS,
    KNOWN_BLOCKS,
    CachedPrefixes,
    WorkerView,
    choose,
    prefix_blocks,
    tokens_left,
)
from streamrl.schemas.identifiers import PolicyVersion

V0, V1 = PolicyVersion(1, 0), PolicyVersion(1, 1)


def view(name: str, left: float = 0.0, *, running: int = 0, slots: int = 4, seen: tuple[int, ...] = ()) -> WorkerView:
    cached = CachedPrefixes()
    cached.add_blocks(seen, V0)
    return WorkerView(name, slots, running, left, V0, cached)


def test_the_least_work_per_slot_wins_and_a_full_worker_gets_none() -> None:
    assert choose([view("a", 100), view("b", 90)], 10, ()) == "b"
    assert choose([view("a", 100, slots=8), view("b", 90)], 10, ()) == "a"
    assert choose([view("a", 0, running=4), view("b", 90, running=1)], 10, ()) == "b"
    assert choose([view("a", running=4)], 10, ()) is None
    assert choose([], 10, ()) is None


def test_a_cached_beginning_is_worth_its_prefill() -> None:
    prompt = [*range(20 * BLOCK_TOKENS)]
    blocks = prefix_blocks(prompt)
    cached = view("cached", 40, seen=blocks)
    # 320 tokens at a sixteenth of a decoding step each are 20 steps; 40 tokens over 4 slots are 10.
    assert choose([cached, view("empty")], len(prompt), blocks) == "cached"
    assert choose([view("cached", 120, seen=blocks), view("empty")], len(prompt), blocks) == "empty"


def test_a_session_goes_where_it_was_unless_that_worker_has_much_more_to_do() -> None:
    assert choose([view("a"), view("b")], 320, (), "b") == "b"
    assert choose([view("a"), view("b", 40)], 320, (), "b") == "b"
    assert choose([view("a"), view("b", 120)], 320, (), "b") == "a"
    assert choose([view("a"), view("b", running=4)], 320, (), "b") == "a"


def test_prefixes_are_known_by_whole_blocks_of_the_same_weights() -> None:
    prompt = [*range(3 * BLOCK_TOKENS + 5)]
    blocks = prefix_blocks(prompt)
    assert len(blocks) == 3
    assert prefix_blocks([7, *prompt[1:]])[2] != blocks[2], "a block's hash is over all before it"
    cached = CachedPrefixes()
    cached.add_blocks(blocks[:2], V0)
    assert cached.length(blocks, V0) == 2 * BLOCK_TOKENS
    assert cached.length(blocks, V1) == 0
    cached.add_blocks(blocks[2:], V1)
    assert cached.length(blocks, V1) == 0, "what other weights computed is gone"
    cached.add_blocks(range(KNOWN_BLOCKS + 10), V1)
    assert cached.length((0,), V1) == 0
    assert cached.length((KNOWN_BLOCKS + 9,), V1) == BLOCK_TOKENS


def test_tokens_left_are_estimated_by_the_median_and_then_by_the_upper_estimate() -> None:
    assert [tokens_left(10, 30, done) for done in (0, 9, 10, 29, 50)] == [10, 4, 20, 4, 4]
