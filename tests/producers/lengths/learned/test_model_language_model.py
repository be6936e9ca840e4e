from collections.abc import Sequence

from streamrl.producers.lengths.learned.language_model import LanguageModel
from streamrl.schemas.trajectories import Prompt


class _Counting:
    def __init__(self) -> None:
        self.asked: list[str] = []

    def score(self, texts: Sequence[str]) -> list[tuple[float, float]]:
        self.asked += texts
        return [(1.0, 2.0) for _ in texts]


def test_a_text_is_scored_once_and_brought_to_scale() -> None:
    regressor = _Counting()
    model = LanguageModel(regressor, scale=0.5, version=3, policy_version=0, observations=1)
    for name in ("p", "q"):
        assert model.quantiles(Prompt(prompt_id=name, dataset="a", content="text")) == (0.5, 1.0)
    assert regressor.asked == ["text"]
