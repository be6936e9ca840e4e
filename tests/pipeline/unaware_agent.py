"""An agent as anybody writes one with OpenAI's package: it is given a client and a model, and knows nothing of ours."""

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    import openai
    from openai.types.chat import ChatCompletionMessageParam

ROUNDS = 2
TOKENS = 4


async def spell(client: "openai.AsyncOpenAI", model: str, word: str) -> list[str]:
    """Have a word spelt, and again; what was answered each time."""
    messages: list[ChatCompletionMessageParam] = [{"role": "user", "content": f"spell {word}:"}]
    said = list[str]()
    for _ in range(ROUNDS):
        answer = await client.chat.completions.create(model=model, messages=messages, max_tokens=TOKENS)
        said.append(answer.choices[0].message.content or "")
        messages += [{"role": "assistant", "content": said[-1]}, {"role": "user", "content": " again:"}]
    return said
