from pathlib import Path

from tests.producers.gateway.stage import stage


async def test_a_conversation_is_answered(tmp_path: Path) -> None:
    async with stage(tmp_path) as it:
        answer = await it.chat("hello")
        print(answer.status_code, answer.text)
        assert answer.status_code == 200
