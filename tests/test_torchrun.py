"""The same cells under `torchrun`: `launch` joins the world that is there."""

import json
import os
import subprocess
import sys
from pathlib import Path

import nbformat
import pytest
import torch

NOTEBOOKS = Path(__file__).parents[1] / "notebooks"


def torchrun(script: Path, ranks: int, cwd: Path) -> subprocess.CompletedProcess:
    command = [
        sys.executable,
        "-m",
        "torch.distributed.run",
        "--standalone",
        "--nproc-per-node",
        str(ranks),
        str(script),
    ]
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "MPLBACKEND": "agg"}
    return subprocess.run(command, cwd=cwd, env=environment, capture_output=True, text=True, timeout=280, check=False)


SCRIPT = """
import os
from course_utils import World, launch
import torch, torch.distributed as dist

def total():
    x = torch.tensor([float(dist.get_rank())])
    dist.all_reduce(x)
    print("from a rank")
    return x.item(), torch.rand(1).item()

print("all", launch(total, world_size=3))
print("two", launch(total, world_size=2))
print("more", launch(lambda: dist.get_world_size(), world_size=8))
with World(3) as world:
    def leave():
        global left
        left = dist.get_rank()
    world.run(leave)
    print("kept", world.run(lambda: left))
print("again", launch(total, world_size=3)[0][1] == launch(total, world_size=2)[0][1])
assert not dist.is_initialized()
open(os.environ["RANK"], "w").write("went on to the end")
"""


def test_launch_joins_prints_once_serves_fewer_ranks_and_says_so_for_more(tmp_path):
    (tmp_path / "script.py").write_text(SCRIPT)
    done = torchrun(Path("script.py"), 3, tmp_path)
    assert done.returncode == 0, done.stderr
    lines = done.stdout.splitlines()
    draw = lines[3].partition("3.0, ")[2].partition(")")[0]
    assert lines[:4] == [*[f"[rank {r}] from a rank" for r in range(3)], f"all {[(3.0, float(draw))] * 3}"]
    assert lines[4:7] == ["[rank 0] from a rank", "[rank 1] from a rank", f"two {[(1.0, float(draw))] * 2}"]
    assert lines[7:10] == [
        "[asked for 8 ranks, and this world has 3: running on 3]",
        "more [3, 3, 3]",
        "kept [0, 1, 2]",
    ]
    assert lines[-1] == "again True"
    assert [(tmp_path / str(rank)).read_text() for rank in range(3)] == ["went on to the end"] * 3


def test_a_failure_ends_the_script_with_the_error_of_the_rank(tmp_path):
    (tmp_path / "script.py").write_text(
        "from course_utils import launch\nimport torch.distributed as dist\n"
        "def work():\n    if dist.get_rank() == 1:\n        raise ValueError('rank one')\n    dist.barrier()\n"
        "launch(work, world_size=2, timeout=20)\nprint('never')\n"
    )
    done = torchrun(Path("script.py"), 2, tmp_path)
    assert done.returncode != 0 and "ValueError: rank one" in done.stderr and "never" not in done.stdout


def scripts() -> list:
    found = []
    for path in sorted(NOTEBOOKS.glob("*.ipynb")):
        course = json.loads(path.read_text(encoding="utf-8"))["metadata"].get("course", {})
        reason = course.get("reason", "") if course.get("script") is False else ""
        if not reason:  # a notebook that can't be a script says why in its metadata; it is left out by name
            found.append(pytest.param(path, id=path.stem))
    return found


@pytest.mark.parametrize("notebook", scripts())
def test_an_exported_notebook_runs_under_torchrun(notebook, tmp_path):
    command = [sys.executable, "-m", "nbconvert", "--to", "script", "--output-dir", str(tmp_path), str(notebook)]
    subprocess.run(command, check=True, capture_output=True, timeout=120)
    done = torchrun(tmp_path / f"{notebook.stem}.py", 2, tmp_path)
    assert done.returncode == 0, done.stderr[-3000:]
    assert "running on 2]" in done.stdout or "world_size=4" not in notebook.read_text(encoding="utf-8")


def test_a_notebook_that_cannot_be_a_script_says_why_in_its_metadata():
    for path in NOTEBOOKS.glob("*.ipynb"):
        course = nbformat.read(path, as_version=4).metadata.get("course", {})
        assert course.get("script", True) is True or len(course.get("reason", "")) > 20, path.name


def test_the_script_to_take_home_trains_and_saves_what_it_trained(tmp_path):
    script = Path(__file__).parents[1] / "docs" / "train_ddp.py"
    done = torchrun(script, 2, tmp_path)
    assert done.returncode == 0, done.stderr
    epochs = [line for line in done.stdout.splitlines() if line.startswith("epoch")]
    losses = [float(line.split()[3]) for line in epochs]
    assert len(epochs) == 3 and all(line.endswith("over 256 samples") for line in epochs)
    assert losses[2] < losses[1] < losses[0]
    assert set(torch.load(tmp_path / "model.pt")) == {"0.weight", "0.bias", "2.weight", "2.bias"}
