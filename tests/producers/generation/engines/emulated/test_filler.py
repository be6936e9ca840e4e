from streamrl.producers.generation.engines.emulated import ConstantRewards, FillerTokenizer
from streamrl.producers.rewards.runner import ScoreRequest
from streamrl.schemas.trajectories import Prompt


def _prompt(text: str) -> Prompt:
    return Prompt(prompt_id="d/0", dataset="d", content=text)


def test_a_prompt_has_a_token_for_so_many_characters_and_at_least_one() -> None:
    tokenizer = FillerTokenizer(4.0)
    assert [len(tokenizer.encode_prompt(_prompt("x" * length))) for length in (0, 1, 4, 5, 400)] == [1, 1, 1, 2, 100]


def test_prompts_share_no_prefix() -> None:
    tokenizer = FillerTokenizer(4.0)
    one, other, again = (tokenizer.encode_prompt(_prompt(text)) for text in ("one prompt", "another one", "one prompt"))
    assert one == again
    assert one[0] != other[0]
    assert one[1:] == other[1:]


async def test_every_completion_gets_the_same_reward_under_each_name() -> None:
    rewards = ConstantRewards(("exact", "format"))
    await rewards.start()
    scores = await rewards.score(ScoreRequest(_prompt("x"), "", [1]))
    await rewards.close()
    assert scores.rewards == {"exact": 1.0, "format": 1.0}
    assert not scores.errors
