"""A server that runs trainers as forked processes, each built by deploy/wiring, each perhaps with a point to die at.

One JSON object a line: in, ``{"config", "log", "point"}``; out, ``{"code"}``, negative for a signal. Forking saves each
trainer the seconds of importing torch and the model's code. The point is armed in the forked process only.
"""

import importlib
import json
import os
import sys
from pathlib import Path
from typing import NoReturn

from streamrl.consumers.training.ranks import team
from streamrl.schemas.errors import StreamRLError
from streamrl.settings.loading import load_settings
from tests.chaos.crashing.points import CrashPoint, arm
from tests.consumers.training.ranks.zygote import fork_rank


def serve() -> None:
    ranks = ("streamrl.consumers.training.ranks.policy", "streamrl.consumers.training.ranks.member")
    for module in ("streamrl.deploy.wiring.trainer", "transformers.models.qwen2.modeling_qwen2", *ranks):
        importlib.import_module(module)
    for line in sys.stdin:
        job = json.loads(line)
        pid = os.fork()
        if pid == 0:
            _become_trainer(job)
        _, status = os.waitpid(pid, 0)
        print(json.dumps({"code": os.waitstatus_to_exitcode(status)}), flush=True)


def _become_trainer(job: dict[str, object]) -> NoReturn:
    code = 1
    log = os.open(str(job["log"]), os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o644)
    for stream in (1, 2):
        os.dup2(log, stream)
    try:
        team.start_rank = fork_rank
        if job["point"]:
            arm(CrashPoint(**job["point"]))  # type: ignore[arg-type]
        code = _train(Path(str(job["config"])))
    except BaseException:
        import traceback

        traceback.print_exc()
    finally:
        sys.stdout.flush()
        os._exit(code)


def _train(config: Path) -> int:
    from streamrl.cli.app import _first_known_error
    from streamrl.deploy.wiring.process import run_role

    try:
        run_role("trainer", load_settings(config, []), "")
    except StreamRLError as error:
        print(f"error: {error}")
        return error.exit_code
    except ExceptionGroup as group:
        ours = _first_known_error(group)
        if ours is None:
            raise
        print(f"error: {ours}")
        return ours.exit_code
    return 0


if __name__ == "__main__":
    serve()
