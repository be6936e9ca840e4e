import asyncio
import threading
import time

import pytest
import torch

from streamrl.consumers.training.policy import ComputeThread


async def test_the_event_loop_goes_on_while_the_thread_computes() -> None:
    compute = ComputeThread(1)
    try:
        calling = asyncio.create_task(compute(time.sleep, 0.2))
        turns = 0
        while not calling.done():
            await asyncio.sleep(0.005)
            turns += 1
        assert turns > 5
    finally:
        compute.close()


async def test_all_calls_share_one_thread_with_the_asked_number_of_torch_threads() -> None:
    compute = ComputeThread(2)  # the tests' own processes have one
    try:
        names = [await compute(lambda: threading.current_thread().name) for _ in range(3)]
        assert len(set(names)) == 1
        assert names[0] != threading.current_thread().name
        assert await compute(torch.get_num_threads) == 2
    finally:
        compute.close()


async def test_an_error_in_the_compute_thread_reaches_the_caller() -> None:
    compute = ComputeThread(0)
    try:
        with pytest.raises(ValueError, match="invalid literal"):
            await compute(int, "x")
    finally:
        compute.close()
