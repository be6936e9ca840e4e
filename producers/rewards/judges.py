"""Judges that take their time, and are made for graders: a model behind an endpoint, and a program that is run.

``llm_judge`` asks any endpoint that speaks OpenAI's chat completions, and reads a number out of the answer.
``code_tests`` runs the program that a completion wrote, then the row's tests, in a process of its own: within the
limits of the reward process (``producers.rewards.sandbox``), without a network unless that is allowed, and in a
directory that is thrown away.
"""

import asyncio
import contextlib
import os
import re
import secrets
import signal
import subprocess
import sys
import tempfile
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    import aiohttp

LLM_JUDGE, CODE_TESTS = "llm_judge", "code_tests"
JUDGE_PROMPT = """Judge the answer to a task.

Task:
{prompt}

Answer:
{completion}

Say in few words what is right and wrong about the answer. Then write, on a line of its own, SCORE: and a number from \
0 (useless) to 10 (right and complete)."""
JUDGE_PATTERN = r"SCORE:\s*(-?\d+(?:\.\d+)?)"
_CODE_BLOCK = re.compile(r"```(?:python|py)?[ \t]*\n(.*?)```", re.DOTALL | re.IGNORECASE)
_PLACEHOLDER = re.compile(r"\{(prompt|completion|answer)\}")
MAX_SAID = 300
"""Characters of what an endpoint or a program said that a reason repeats."""
MAX_FILE_BYTES = 1 << 20
"""Of each file that a program writes; what it prints goes into one."""

# Runs as `python -I -c`. The word is read before the program runs and said behind the last test, so that a program
# which ends early, with whatever exit code, has passed nothing.
_HARNESS = """
import os, resource, sys
word, said, most = sys.stdin.readline(), int(sys.argv[1]), int(sys.argv[2])
os.set_inheritable(said, False)
sys.stdin.close()
hard = resource.getrlimit(resource.RLIMIT_FSIZE)[1]
most = most if hard == resource.RLIM_INFINITY else min(most, hard)
resource.setrlimit(resource.RLIMIT_FSIZE, (most, most))
sys.argv[1:] = []
scope = {"__name__": "__main__"}
exec(compile(open("program.py").read(), "program.py", "exec"), scope)
exec(compile(open("tests.py").read(), "tests.py", "exec"), scope)
os.write(said, word.encode())
"""


@dataclass(frozen=True)
class JudgeOptions:
    """Whom ``llm_judge`` asks, and what; see ``[rewards]``."""

    base_url: str = ""
    model: str = ""
    prompt: str = JUDGE_PROMPT
    pattern: str = JUDGE_PATTERN
    scale: float = 10.0
    max_tokens: int = 512
    key_variable: str = "OPENAI_API_KEY"


class JudgeError(Exception):
    """The judge did not give a number; what it said instead."""


class LlmJudge:
    """The reward: what a model says of the completion, as a number from 0 to 1."""

    __name__ = LLM_JUDGE

    def __init__(self, options: JudgeOptions) -> None:
        self._options = options
        self._url = options.base_url.rstrip("/") + "/chat/completions"
        self._session: aiohttp.ClientSession | None = None

    async def __call__(
        self,
        prompts: Sequence[Any],
        completions: Sequence[Any],
        answer: Sequence[Any] | None = None,
        **_columns: Any,
    ) -> list[float]:
        """Ask about each completion.

        Raises:
            JudgeError: an answer is none.
            aiohttp.ClientError: nobody answers.
        """
        answers = answer or [""] * len(completions)
        questions = [
            filled(self._options.prompt, prompt=_text(prompt), completion=_text(completion), answer=str(wanted))
            for prompt, completion, wanted in zip(prompts, completions, answers, strict=True)
        ]
        said = await asyncio.gather(*(self._ask(question) for question in questions))
        return [number_in(each, self._options.pattern, self._options.scale) for each in said]

    async def close(self) -> None:
        """Release the connections; a reward process ends with them."""
        if self._session is not None:
            await self._session.close()

    async def _ask(self, question: str) -> str:
        # One for all calls, so that connections are kept; made here, within the loop that will use it.
        if self._session is None:
            import aiohttp  # which settings, that know the options, have no use for

            key = os.environ.get(self._options.key_variable)
            self._session = aiohttp.ClientSession(headers={"Authorization": f"Bearer {key}"} if key else {})
        body = {
            "model": self._options.model,
            "messages": [{"role": "user", "content": question}],
            "temperature": 0,
            "max_tokens": self._options.max_tokens,
        }
        async with self._session.post(self._url, json=body) as response:
            if response.status != 200:
                raise JudgeError(f"expected an answer from {self._url}, got {response.status}: {await _said(response)}")
            answer = await response.json()
        try:
            return str(answer["choices"][0]["message"]["content"] or "")
        except (KeyError, IndexError, TypeError) as error:
            raise JudgeError(f"expected a chat completion from {self._url}, got {str(answer)[:MAX_SAID]}") from error


async def _said(response: "aiohttp.ClientResponse") -> str:
    return " ".join((await response.text())[:MAX_SAID].split())


def filled(template: str, **values: str) -> str:
    """The template with each placeholder replaced once: what stands in a completion is not looked into again."""
    return _PLACEHOLDER.sub(lambda match: values[match[1]], template)


def number_in(said: str, pattern: str, scale: float) -> float:
    """The number in the pattern's last match, divided by the scale, from 0 to 1.

    Raises:
        JudgeError: there is none.
    """
    last = deque(re.finditer(pattern, said, re.DOTALL), maxlen=1)
    try:
        return min(1.0, max(0.0, float(last[0][1 if last[0].re.groups else 0]) / scale))
    except (IndexError, ValueError) as error:
        tail = " ".join(said[-MAX_SAID:].split())
        raise JudgeError(f"expected the judge to say a number as {pattern!r} finds it, got ...{tail!r}") from error


def _text(said: Any) -> str:
    """Plain text as it is; of a conversation, who said what."""
    if isinstance(said, str):
        return said
    if len(said) == 1:
        return str(said[0]["content"])
    return "\n\n".join(f"{turn['role']}: {turn['content']}" for turn in said)


def code_tests(timeout_s: float) -> Callable[..., list[float | None]]:
    """Makes the reward: 1 if the completion's last block of Python passes the row's column ``tests``, else 0.

    ``tests``: Python, such as assertions, that sees the program's names. None where the row has no tests. A completion
    without a block is a program as a whole.
    """

    def score(completions: Sequence[Any], tests: Sequence[Any] | None = None, **_columns: Any) -> list[float | None]:
        if tests is None:
            raise ValueError("expected a column 'tests' with the Python that judges a program, got none")
        return [
            None if wanted is None else float(passes(program_in(_text(completion)), str(wanted), timeout_s))
            for completion, wanted in zip(completions, tests, strict=True)
        ]

    return score


def program_in(text: str) -> str:
    """The last block of code that is marked as Python's or as nobody's; the whole text if there is none."""
    blocks = _CODE_BLOCK.findall(text)
    return blocks[-1] if blocks else text


def passes(program: str, tests: str, timeout_s: float) -> bool:
    """Whether the tests get through behind the program, within the time, in a process and directory of their own."""
    word = secrets.token_hex(16)
    with tempfile.TemporaryDirectory(prefix="streamrl-code-", ignore_cleanup_errors=True) as scratch:
        place = Path(scratch)
        (place / "program.py").write_text(program, encoding="utf-8", errors="replace")
        (place / "tests.py").write_text(tests, encoding="utf-8", errors="replace")
        said, saying = os.pipe()
        # What the program left running may hold the other end.
        os.set_blocking(said, False)
        try:
            return _run(place, word, saying, timeout_s) and os.read(said, 64).decode() == f"{word}\n"
        except BlockingIOError:
            return False
        finally:
            os.close(said)


def _run(place: Path, word: str, saying: int, timeout_s: float) -> bool:
    """Whether the harness ended by itself in time; closes ``saying``, and ends whatever the program started."""
    try:
        with (place / "output").open("wb") as output:
            # To run a stranger's program is what this is for, within the limits of this process.
            process = subprocess.Popen(  # noqa: S603
                [sys.executable, "-I", "-c", _HARNESS, str(saying), str(MAX_FILE_BYTES)],
                cwd=place,
                stdin=subprocess.PIPE,
                stdout=output,
                stderr=output,
                env={"PATH": os.environ.get("PATH", ""), "HOME": str(place), "TMPDIR": str(place)},
                pass_fds=(saying,),
                start_new_session=True,
            )
    finally:
        os.close(saying)
    try:
        process.communicate(f"{word}\n".encode(), timeout=timeout_s)
        return True
    except subprocess.TimeoutExpired:
        return False
    finally:
        with contextlib.suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGKILL)
        process.wait()
