"""``exercises/`` is what nbgrader makes of ``solutions/``, file for file."""

import filecmp
import shutil
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent


def topics(folder: Path) -> list[str]:
    return sorted(path.name for path in folder.iterdir() if path.is_dir() and not path.name.startswith("."))


def test_the_exercises_are_generated_from_the_solutions(tmp_path):
    assert topics(ROOT / "exercises") == topics(ROOT / "solutions") != []
    shutil.copy(ROOT / "nbgrader_config.py", tmp_path)
    unwanted = shutil.ignore_patterns(".ipynb_checkpoints", "__pycache__")
    shutil.copytree(ROOT / "solutions", tmp_path / "solutions", ignore=unwanted)
    for topic in topics(ROOT / "solutions"):
        generate = [sys.executable, "-m", "nbgrader", "generate_assignment", topic, "--force", "--no-db"]
        done = subprocess.run(generate, cwd=tmp_path, capture_output=True, text=True)
        assert done.returncode == 0, done.stderr
        made = sorted(p.relative_to(tmp_path) for p in (tmp_path / "exercises" / topic).rglob("*") if p.is_file())
        kept = sorted(
            p.relative_to(ROOT)
            for p in (ROOT / "exercises" / topic).rglob("*")
            if p.is_file() and not {".ipynb_checkpoints", "__pycache__"} & set(p.parts)
        )
        assert made == kept, "run `make exercises`"
        _, different, unreadable = filecmp.cmpfiles(tmp_path, ROOT, made, shallow=False)
        assert different + unreadable == [], "run `make exercises`"
    assert not list(tmp_path.rglob("*.db"))
