"""An environment with one tool, a Python interpreter, whose code runs in a process without network and with limits.

Invariant code_is_confined_or_not_run: where the kernel gives no user namespace, nothing is executed, and the
environment says so at its start.
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
from streamrl.schemas.import_path import own_command

MAX_OUTPUT = 4000
"""Characters of what a program printed that the policy is told."""
END_S = 2.0
"""For a killed program to be gone: one that has left its session may keep the pipe open."""
_ROOT = str(Path(__file__).parents[3])
DEFINITION: Mapping[str, Any] = {
    "type": "function",
    "function": {
        "name": "python",
        "description": "Run a Python program; what it prints is the answer.",
        "parameters": {"type": "object", "properties": {"code": {"type": "string"}}, "required": ["code"]},
    },
}


class PythonTool:
    """Tasks with an answer, which a program may help to find. ``tasks``: objects of ``question`` and ``answer``.

    The policy calls the tool ``python``, or writes a block of code, and answers in the end with text whose last word is
    the answer.
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
            raise UserError("expected environments.options.python.tasks, got none; list objects of question and answer")
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
        told = "expected the tool python with its code" if not isinstance(code, str) else await self.run(code)
        return {"role": "tool", "tool_call_id": call_id, "content": told}

    async def run(self, code: str) -> str:
        """What a program prints, errors included; at most ``MAX_OUTPUT`` characters of it."""
        with tempfile.TemporaryDirectory(prefix="streamrl-python-") as scratch:
            process = await asyncio.create_subprocess_exec(
                *own_command("streamrl.producers.environments.python_tool", json.dumps(vars(self._limits))),
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
                # While what was written stands unread, the end of the process is not seen.
                with suppress(TimeoutError):
                    async with asyncio.timeout(END_S):
                        await _pass_over(process.stdout)
                        await process.wait()
        return said.decode(errors="replace")[:MAX_OUTPUT] or "(no output)"

    async def close(self) -> None:
        """Nothing is held."""


async def _first(stream: asyncio.StreamReader, most: int) -> bytes:
    """The first bytes of what comes, up to the end; whoever writes more is not waited for."""
    said = bytearray()
    while len(said) < most and (piece := await stream.read(most - len(said))):
        said += piece
    return bytes(said)


async def _pass_over(stream: asyncio.StreamReader) -> None:
    while await stream.read(1 << 16):
        pass


def main(limits: str) -> None:
    """Confine this process, then run what stands on standard input; the working directory is for it alone."""
    program = Path("program.py")
    program.write_text(sys.stdin.read())
    try:
        confine(RewardConfinement(**json.loads(limits)))
    except UserError as error:
        sys.exit(f"nothing was run: {error}")
    runpy.run_path(str(program), run_name="__main__")


if __name__ == "__main__":
    main(sys.argv[1])
