from collections.abc import Iterator

import pytest

from tests.consumers.training.ranks.team import close_all
from tests.consumers.training.ranks.zygote import Zygote


@pytest.fixture(scope="session", autouse=True)
def rank_zygote() -> Iterator[None]:
    zygote = Zygote.started()
    yield
    zygote.close()


@pytest.fixture(autouse=True)
def _no_rank_stays() -> Iterator[None]:
    yield
    close_all()
