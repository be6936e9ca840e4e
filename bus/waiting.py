"""Waiting in place of sleeping, so that what is waited for is seen at once."""

import asyncio


async def happens_within(event: asyncio.Event, seconds: float) -> bool:
    """Wait until an event is set, or so long; whether it is set."""
    try:
        async with asyncio.timeout(seconds):
            return await event.wait()
    except TimeoutError:
        return event.is_set()
