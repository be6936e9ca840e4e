import os
import subprocess
import sys
from pathlib import Path

from tests.packaging.scripts import share_byte_code


def test_byte_code_is_shared_of_equal_files_and_used(tmp_path: Path) -> None:
    source, target = tmp_path / "one", tmp_path / "other"
    for place in (source, target):
        (place / "kept").mkdir(parents=True)
        for name in ("same", "changed"):
            (place / "kept" / f"{name}.py").write_text(f"print({name!r}, __file__)\n")
            os.utime(place / "kept" / f"{name}.py", (1e9, 1e9))
    (target / "kept" / "changed.py").write_text("print('newer')\n")
    (source / "alone.py").write_text("")
    (source / "only").mkdir()
    (source / "only" / "here.py").write_text("")
    subprocess.run([sys.executable, "-m", "compileall", "-q", source], check=True)
    assert share_byte_code.share(source, target) == 1
    code = "import kept.same, kept.changed"
    said = subprocess.run([sys.executable, "-v", "-c", code], cwd=target, capture_output=True, text=True, check=True)
    assert said.stdout.split() == ["same", str(target / "kept/same.py"), "newer"]
    assert f"code object from {str(target / 'kept/__pycache__')!r}"[:-1] in said.stderr
    assert not (target / "only").exists()
