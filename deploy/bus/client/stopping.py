"""Ends clients of aiokafka within a bounded time, also those whose broker is gone."""

import asyncio
import itertools
from typing import Any

from aiokafka import AIOKafkaProducer
from aiokafka.errors import ProducerClosed

CLOSE_TIMEOUT_S = 5.0
FORCE_TIMEOUT_S = 3.0


async def discard(client: Any, timeout_s: float = CLOSE_TIMEOUT_S) -> None:
    """Stop a client of any kind; errors and a stop that never ends are of no interest any more.

    In a task of its own, because aiokafka lets a cancellation of its inner tasks escape from ``stop``.
    """
    stopping = asyncio.create_task((getattr(client, "stop", None) or client.close)())
    await asyncio.wait([stopping], timeout=timeout_s)
    stopping.cancel()
    await asyncio.gather(stopping, return_exceptions=True)


async def stop(producer: AIOKafkaProducer, patience_s: float) -> None:
    """Stop gracefully within the patience, else by force; errors are of no interest any more."""
    left = _own_futures(producer)
    stopping = asyncio.create_task(discard(producer, FORCE_TIMEOUT_S + patience_s))
    await asyncio.wait([stopping], timeout=patience_s)
    if not stopping.done():
        left |= _own_futures(producer)
        await _end_sender(producer)
    await stopping
    for future in left | _own_futures(producer):
        if future.done() and not future.cancelled():
            future.exception()  # looked at, or asyncio would log that nobody did


async def _end_sender(producer: AIOKafkaProducer) -> None:
    """End what retries for ever while the broker is away; aiokafka has no public way to do so."""
    await producer.client.close()
    sender = producer._sender.sender_task  # noqa: SLF001
    while sender is not None and not sender.done():
        sender.cancel()  # once ends the sender, once more the request that it waits for
        await asyncio.wait([sender], timeout=0.2)
    producer._message_accumulator.fail_all(ProducerClosed())  # noqa: SLF001


def _own_futures(producer: AIOKafkaProducer) -> "set[asyncio.Future[Any]]":
    """Futures in which aiokafka leaves errors, besides those that it hands out."""
    accumulator, transactions = producer._message_accumulator, producer._txn_manager  # noqa: SLF001
    batches = [*itertools.chain(*accumulator._batches.values()), *accumulator._pending_batches]  # noqa: SLF001
    futures = {future for batch in batches for future in (batch.future, batch._drain_waiter)}  # noqa: SLF001
    if transactions is not None and transactions._transaction_waiter is not None:  # noqa: SLF001
        futures.add(transactions._transaction_waiter)  # noqa: SLF001
    return futures
