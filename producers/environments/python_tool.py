"""An environment with one tool, a Python interpreter, which runs code in a process with limits and without network.

Invariant code_is_confined_or_not_run: if the kernel provides no user namespaces, no code is executed, and the tool's
output says so.
"""

import asyncio
import json
import os
import runpy
import signal
import sys
import tempfile
from collections.abc import Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any

from streamrl.producers.rewards.sandbox import RewardConfinement, confine
from streamrl.schemas.environments import EnvironmentStep, Message, PolicyReply
from streamrl.schemas.errors import UserError
from streamrl.schemas.import_path import module_command

MAX_OUTPUT = 4000
"""Characters of a program's output that the policy gets."""
END_S = 2.0
"""Seconds to wait for a killed program's end: a process that has left its session may keep the pipe open."""
_ROOT = str(Path(__file__).parents[3])
DEFINITION: Mapping[str, Any] = {
    "type": "function",
    "function": {
        "name": "python",
        "description": "Run a Python program; its output is the answer.",
        "parameters": {"type": "object", "properties": {"code": {"type": "string"}}, "required": ["code"]},
    },
}


class PythonTool:
    """Questions that a program may help to answer. ``tasks``: objects with ``question`` and ``answer``.

    The policy calls the tool ``python``, or writes a code block. In the end it writes text whose last word is the
    answer.
    """

    tools: Sequence[Mapping[str, Any]] = (DEFINITION,)

    def __init__(
        self,
        *,
        tasks: Sequence[Mapping[str, Any]] = (),
        timeout_s: float = 5.0,
        max_memory_bytes: int = 512 << 20,
        max_processes: int = 8,
        max_tokens: int | None = None,
    ) -> None:
        if not tasks:
            raise UserError(
                "expected environments.options.python.tasks, got none; list objects with question and answer"
            )
        self._tasks, self._timeout_s = tasks, timeout_s
        self._limits = RewardConfinement(
            network=False,
            max_processes=max_processes,
            max_memory_bytes=max_memory_bytes,
            max_file_bytes=1 << 20,
            max_open_files=64,
        )
        self._answer = ""
        self.request: Mapping[str, Any] = {} if max_tokens is None else {"max_tokens": max_tokens}

    async def reset(self, task: int) -> Sequence[Message]:
        """See ``Environment``."""
        chosen = self._tasks[task % len(self._tasks)]
        self._answer = str(chosen["answer"]).strip()
        return [{"role": "user", "content": str(chosen["question"])}]

    async def step(self, reply: PolicyReply) -> EnvironmentStep:
        """See ``Environment``."""
        if reply.tool_calls:
            return EnvironmentStep(
                [await self._called(call.id, call.name, call.arguments) for call in reply.tool_calls]
            )
        _, opened, rest = reply.content.partition("```python\n")
        if opened:
            return EnvironmentStep([{"role": "user", "content": await self.run(rest.partition("```")[0])}])
        words = reply.content.split()
        return EnvironmentStep(reward=float(bool(words) and words[-1].strip(".") == self._answer), done=True)

    async def _called(self, call_id: str, name: str, arguments: str) -> Message:
        try:
            code = json.loads(arguments)["code"] if name == "python" else None
        except (ValueError, KeyError, TypeError):
            code = None
        output = "expected the tool python with its code" if not isinstance(code, str) else await self.run(code)
        return {"role": "tool", "tool_call_id": call_id, "content": output}

    async def run(self, code: str) -> str:
        """A program's output, including errors; at most its first ``MAX_OUTPUT`` characters."""
        with tempfile.TemporaryDirectory(prefix="streamrl-python-") as scratch:
            process = await asyncio.create_subprocess_exec(
                *module_command("streamrl.producers.environments.python_tool", json.dumps(vars(self._limits))),
                stdin=asyncio.subprocess.PIPE,
                stdout=asyncio.subprocess.PIPE,
                stderr=asyncio.subprocess.STDOUT,
                cwd=scratch,
                env={"PATH": os.defpath, "PYTHONPATH": _ROOT, "HOME": scratch, "TMPDIR": scratch},
                start_new_session=True,
            )
            assert process.stdin is not None
            assert process.stdout is not None
            try:
                async with asyncio.timeout(self._timeout_s):
                    with suppress(ConnectionError):
                        process.stdin.write(code.encode(errors="replace"))
                        await process.stdin.drain()
                    process.stdin.close()
                    said = await _first(process.stdout, 4 * MAX_OUTPUT)
            except TimeoutError:
                return f"timed out after {self._timeout_s:g} s"
            finally:
                with suppress(ProcessLookupError):
                    os.killpg(process.pid, signal.SIGKILL)
                # asyncio does not report the end of the process while its output is unread.
                with suppress(TimeoutError):
                    async with asyncio.timeout(END_S):
                        await _discard(process.stdout)
                        await process.wait()
        return said.decode(errors="replace")[:MAX_OUTPUT] or "(no output)"

    async def close(self) -> None:
        """Do nothing."""


async def _first(stream: asyncio.StreamReader, most: int) -> bytes:
    """The stream's first ``most`` bytes, or all of it if it ends before."""
    said = bytearray()
    while len(said) < most and (piece := await stream.read(most - len(said))):
        said += piece
    return bytes(said)


async def _discard(stream: asyncio.StreamReader) -> None:
    while await stream.read(1 << 16):
        pass


def main(limits: str) -> None:
    """Confine this process, then run the program from standard input. The working directory is the program's alone."""
    program = Path("program.py")
    program.write_text(sys.stdin.read())
    try:
        confine(RewardConfinement(**json.loads(limits)))
    except UserError as error:
        sys.exit(f"nothing was run: {error}")
    runpy.run_path(str(program), run_name="__main__")


if __name__ == "__main__":
    main(sys.argv[1])
