"""Two slow reward functions, meant for graders: ``llm_judge`` asks a model, ``code_tests`` runs a program.

``llm_judge`` sends each completion to an endpoint with OpenAI's chat completions API, and reads a score from the
answer. ``code_tests`` runs the completion's program, then the row's tests, in a separate process. That process has the
limits of the reward process (``producers.rewards.sandbox``), and no network unless ``rewards.code_network`` allows it.
Its working directory is deleted afterwards.
"""

import ast
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

from streamrl.producers.rewards.answers import accepted

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
JUDGE_KEY = "OPENAI_API_KEY"
"""Environment variable with the endpoint's API key, the same as for OpenAI's own client."""
JUDGE_SCALE = 10.0
"""The judge's score that gives a reward of 1."""
_SCORE = re.compile(r"\bscore\b\**\s*:[\s*]*(-?\d+(?:\.\d+)?)", re.IGNORECASE)
_CODE_BLOCK = re.compile(r"```(?:python|py)?[ \t]*\n(.*?)```", re.DOTALL | re.IGNORECASE)
_PLACEHOLDER = re.compile(r"\{(prompt|completion|answer)\}")
_TESTS_NOTHING = (ast.Import, ast.ImportFrom, ast.FunctionDef, ast.AsyncFunctionDef, ast.ClassDef, ast.Pass)
"""Statements that a program cannot fail."""
MAX_QUOTED = 300
"""Most characters of an endpoint's answer that an error quotes."""
MAX_FILE_BYTES = 1 << 20
"""Most bytes of each file that a program writes, including the file with its output."""

# The harness runs as `python -I -c`. It reads a secret word before the program runs, and writes the word back after the
# last test. So a program that exits early does not pass, even with exit code 0.
_HARNESS = """
import os, resource, sys
word, word_in, most = sys.stdin.readline(), int(sys.argv[1]), int(sys.argv[2])
os.set_inheritable(word_in, False)
sys.stdin.close()
hard = resource.getrlimit(resource.RLIMIT_FSIZE)[1]
most = most if hard == resource.RLIM_INFINITY else min(most, hard)
resource.setrlimit(resource.RLIMIT_FSIZE, (most, most))
sys.argv[1:] = []
scope = {"__name__": "__main__"}
exec(compile(open("program.py").read(), "program.py", "exec"), scope)
exec(compile(open("tests.py").read(), "tests.py", "exec"), scope)
os.write(word_in, word.encode())
"""


@dataclass(frozen=True)
class JudgeOptions:
    """The endpoint and the question of ``llm_judge``; see ``[rewards]``."""

    base_url: str = ""
    model: str = ""
    prompt: str = JUDGE_PROMPT


MAX_TOKENS = 2048
"""Most tokens of a judge's answer: room for reasons before the score."""


class JudgeError(Exception):
    """The endpoint reported an error, or the judge gave no score. The message quotes the answer."""


class LlmJudge:
    """A reward function: the score that a model gives the completion, from 0 to 1."""

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
        """Ask the model about each completion; returns the rewards.

        Raises:
            JudgeError: an answer has no score, or the endpoint reports an error.
            ValueError: the question contains the expected answer, which is neither text nor a number.
            aiohttp.ClientError: the endpoint does not answer.
        """
        answers = answer or [None] * len(completions)
        asks_for_answer = "{answer}" in self._options.prompt
        questions = [
            filled(
                self._options.prompt,
                prompt=_text(prompt),
                completion=_text(completion),
                answer=" or ".join(accepted(wanted)) if asks_for_answer else "",
            )
            for prompt, completion, wanted in zip(prompts, completions, answers, strict=True)
        ]
        replies = await asyncio.gather(*(self._ask(question) for question in questions))
        return [score_in(reply) for reply in replies]

    async def close(self) -> None:
        """Close the connections. A reward process need not call this, because its exit closes them."""
        if self._session is not None:
            await self._session.close()

    async def _ask(self, question: str) -> str:
        # All calls share one session, so that connections are reused. It is created in the event loop that uses it.
        if self._session is None:
            import aiohttp  # not at the top: the settings import this module, and do not need aiohttp

            key = os.environ.get(JUDGE_KEY)
            self._session = aiohttp.ClientSession(headers={"Authorization": f"Bearer {key}"} if key else {})
        body = {
            "model": self._options.model,
            "messages": [{"role": "user", "content": question}],
            "temperature": 0,
            "max_tokens": MAX_TOKENS,
        }
        async with self._session.post(self._url, json=body) as response:
            if response.status != 200:
                raise JudgeError(
                    f"expected an answer from {self._url}, got status {response.status}: {await _excerpt(response)}"
                )
            answer = await response.json()
        try:
            return str(answer["choices"][0]["message"]["content"] or "")
        except (KeyError, IndexError, TypeError) as error:
            raise JudgeError(f"expected a chat completion from {self._url}, got {str(answer)[:MAX_QUOTED]}") from error


async def _excerpt(response: "aiohttp.ClientResponse") -> str:
    return " ".join((await response.text())[:MAX_QUOTED].split())


def filled(template: str, **values: str) -> str:
    """Fill in the template's placeholders. Placeholders inside a filled-in value are not replaced."""
    return _PLACEHOLDER.sub(lambda match: values[match[1]], template)


def score_in(reply: str) -> float:
    """The number after the last ``SCORE:``, divided by ``JUDGE_SCALE`` and limited to the range from 0 to 1.

    Raises:
        JudgeError: the reply has no such number.
    """
    last = deque(_SCORE.finditer(reply), maxlen=1)
    try:
        return min(1.0, max(0.0, float(last[0][1]) / JUDGE_SCALE))
    except IndexError as error:
        tail = " ".join(reply[-MAX_QUOTED:].split())
        raise JudgeError(f"expected SCORE: and a number in the judge's answer, got ...{tail!r}") from error


def _text(content: Any) -> str:
    """A prompt or completion as plain text. A conversation of several turns shows the role of each turn."""
    if isinstance(content, str):
        return content
    if len(content) == 1:
        return str(content[0]["content"])
    return "\n\n".join(f"{turn['role']}: {turn['content']}" for turn in content)


def code_tests(timeout_s: float) -> Callable[..., list[float | None]]:
    """Make the reward function, which gives 1 if the completion's program passes the row's ``tests``, else 0.

    ``tests``: Python code, such as assertions, or a list of such texts, that can use the program's names. The reward is
    None if the row has no tests. A completion without a block is run as a whole.
    """

    def score(completions: Sequence[Any], tests: Sequence[Any] | None = None, **_columns: Any) -> list[float | None]:
        if tests is None:
            raise ValueError("expected a column 'tests' with Python code that tests a program, got none")
        return [
            None if wanted is None else float(passes(program_in(_text(completion)), tests_in(wanted), timeout_s))
            for completion, wanted in zip(completions, tests, strict=True)
        ]

    return score


def tests_in(wanted: Any) -> str:
    """A row's tests as one program.

    Raises:
        ValueError: they are no Python code, or code that every program passes, such as a list or a definition alone.
    """
    code = "\n".join(wanted) if isinstance(wanted, list) and all(isinstance(one, str) for one in wanted) else wanted
    if not isinstance(code, str):
        raise ValueError(f"expected Python code, or a list of such texts, in column 'tests', got {wanted!r:.60}")
    try:
        statements = ast.parse(code).body
    except (SyntaxError, ValueError) as error:
        raise ValueError(f"expected Python code in column 'tests', got {code!r:.60}: {error}") from error
    if all(isinstance(one, _TESTS_NOTHING) or _is_literal(one) for one in statements):
        raise ValueError(
            f"expected tests that call the program, got {code!r:.60}, which every program passes; add assertions"
        )
    return code


def _is_literal(statement: ast.stmt) -> bool:
    if not isinstance(statement, ast.Expr | ast.Assign | ast.AnnAssign) or statement.value is None:
        return False
    try:
        ast.literal_eval(statement.value)
    except (ValueError, TypeError, SyntaxError, MemoryError, RecursionError):
        return False
    return True


def program_in(text: str) -> str:
    """The last code block that is marked as Python or not marked at all; without one, the whole text."""
    blocks = _CODE_BLOCK.findall(text)
    return blocks[-1] if blocks else text


def passes(program: str, tests: str, timeout_s: float) -> bool:
    """Whether the program and then its tests run to the end in time, in a separate process and directory."""
    word = secrets.token_hex(16)
    with tempfile.TemporaryDirectory(prefix="streamrl-code-", ignore_cleanup_errors=True) as scratch:
        place = Path(scratch)
        (place / "program.py").write_text(program, encoding="utf-8", errors="replace")
        (place / "tests.py").write_text(tests, encoding="utf-8", errors="replace")
        word_out, word_in = os.pipe()
        # The read must not block: processes that the program left running may hold the other end open.
        os.set_blocking(word_out, False)
        try:
            return _run(place, word, word_in, timeout_s) and os.read(word_out, 64).decode() == f"{word}\n"
        except BlockingIOError:
            return False
        finally:
            os.close(word_out)


def _run(place: Path, word: str, word_in: int, timeout_s: float) -> bool:
    """Run the harness; returns whether it exited in time. Closes ``word_in``, and kills the harness's process group."""
    try:
        with (place / "output").open("wb") as output:
            # Running an untrusted program is the purpose here. The limits of this process apply to it.
            process = subprocess.Popen(  # noqa: S603
                [sys.executable, "-I", "-c", _HARNESS, str(word_in), str(MAX_FILE_BYTES)],
                cwd=place,
                stdin=subprocess.PIPE,
                stdout=output,
                stderr=output,
                env={"PATH": os.environ.get("PATH", ""), "HOME": str(place), "TMPDIR": str(place)},
                pass_fds=(word_in,),
                start_new_session=True,
            )
    finally:
        os.close(word_in)
    try:
        process.communicate(f"{word}\n".encode(), timeout=timeout_s)
        return True
    except subprocess.TimeoutExpired:
        return False
    finally:
        with contextlib.suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGKILL)
        process.wait()
