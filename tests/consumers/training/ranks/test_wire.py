"""Messages arrive unchanged, and each side notices when the other is gone."""

import socket
from typing import Any

import numpy as np
from numpy.typing import NDArray

from streamrl.consumers.training.ranks.wire import RankMessage, Wire


def test_values_and_arrays_arrive_as_they_were() -> None:
    ours, theirs = (Wire(end) for end in socket.socketpair())
    arrays: dict[str, NDArray[Any]] = {
        "ids": np.arange(6, dtype=np.int64).reshape(2, 3),
        "none": np.zeros((0, 4), dtype=np.float32),
        "cut": np.arange(12, dtype=np.float32).reshape(3, 4)[:, 1:3],
        "last": np.zeros(0, dtype=np.int64),
    }
    ours.send(RankMessage("gradient", {"refs": [["p/0/0/1", 2, 7]], "loss": float("inf")}, arrays))
    ours.send(RankMessage("sums"))
    found, second = theirs.receive(), theirs.receive()
    assert found is not None
    assert (found.word, found.values) == ("gradient", {"refs": [["p/0/0/1", 2, 7]], "loss": float("inf")})
    assert found.arrays.keys() == arrays.keys()
    assert all(np.array_equal(found.arrays[name], array) for name, array in arrays.items())
    assert all(found.arrays[name].dtype == array.dtype for name, array in arrays.items())
    assert second == RankMessage("sums")
    ours.close()
    assert theirs.receive() is None
    theirs.close()
