"""Ranks and a real Jupyter kernel: interrupts, restarts, a killed kernel, and that nothing is ever left behind."""

import json
import os
import signal
import subprocess
import sys
import textwrap
import time
import uuid
from pathlib import Path

import jupyter_client
import psutil
import pytest


class Kernel:
    """A kernel as a front end sees it. Everything that it starts carries a mark in its environment."""

    def __init__(self, folder: Path):
        self.mark = uuid.uuid4().hex
        self.folder = folder
        self.manager = jupyter_client.KernelManager(kernel_name="python3")
        environment = {**os.environ, "COURSE_TEST_MARK": self.mark, "TMPDIR": str(folder)}
        self.manager.start_kernel(env=environment, cwd=str(folder), extra_arguments=["--log-level=ERROR"])
        self.client = self.manager.client()
        self.client.start_channels()
        self.client.wait_for_ready(timeout=60)
        self.run("import os, time\nfrom course_utils import World, launch\nimport torch, torch.distributed as dist")
        self.run("launch(dist.get_rank, world_size=2)")  # the ranks are warm from here on

    def send(self, code: str, allow_stdin: bool = False) -> str:
        """As nbval and nbconvert run a cell; with `allow_stdin`, as JupyterLab does."""
        return self.client.execute(textwrap.dedent(code), allow_stdin=allow_stdin)

    def result(self, request: str) -> list[tuple[str, str]]:
        """(kind, text) of each output of a cell."""
        outputs = []
        while True:
            message = self.client.get_iopub_msg(timeout=120)
            kind, content = message["msg_type"], message["content"]
            if message["parent_header"].get("msg_id") != request:
                continue
            if kind == "status" and content["execution_state"] == "idle":
                return outputs
            if kind == "stream" and outputs and outputs[-1][0] == content["name"]:
                outputs[-1] = (content["name"], outputs[-1][1] + content["text"])
            elif kind == "stream":
                outputs.append((content["name"], content["text"]))
            elif kind == "error":
                outputs.append(("error", "\n".join(content["traceback"])))
            elif "data" in content:
                outputs.append(("value", content["data"].get("text/plain", "")))

    def run(self, code: str, **options) -> list[tuple[str, str]]:
        return self.result(self.send(code, **options))

    def processes(self) -> list[psutil.Process]:
        """The kernel's helpers and ranks that are alive."""
        return [p for p in marked(self.mark) if p.pid != self.manager.provisioner.pid]

    def close(self) -> None:
        self.client.stop_channels()
        self.manager.shutdown_kernel(now=True)
        self.manager.cleanup_resources()


def marked(mark: str) -> list[psutil.Process]:
    found = []
    for process in psutil.process_iter():
        try:
            if process.environ().get("COURSE_TEST_MARK") == mark and process.status() != psutil.STATUS_ZOMBIE:
                found.append(process)
        except psutil.Error:
            pass
    return found


def wait_until(condition, seconds: float) -> bool:
    end = time.monotonic() + seconds
    while not (true := condition()) and time.monotonic() < end:
        time.sleep(0.02)
    return bool(true)


@pytest.fixture
def kernel(tmp_path):
    kernel = Kernel(tmp_path)
    yield kernel
    kernel.close()
    assert wait_until(lambda: not marked(kernel.mark), 5), marked(kernel.mark)


def test_a_cell_gets_values_and_labelled_lines(kernel):
    outputs = kernel.run("launch(lambda: print('hello') or dist.get_rank(), world_size=2)")
    assert outputs == [("stdout", "[rank 0] hello\n[rank 1] hello\n"), ("value", "[0, 1]")]


def test_a_failure_raises_in_the_cell_with_the_line_of_the_cell_and_no_path(kernel):
    ((kind, text),) = kernel.run(
        """
        def work():
            x = torch.ones(4)
            if dist.get_rank() == 1:
                x = x.reshape(3)
            dist.all_reduce(x)
        launch(work, world_size=2)"""
    )
    assert kind == "error" and text.startswith("RankError: rank 1 raised RuntimeError: shape '[3]' is invalid")
    assert "in line 4 of the cell, in work:" in text and "-->   4         x = x.reshape(3)" in text
    assert "line 5 of the cell, in work: dist.all_reduce(x)" in text and "/" not in text


def test_source_of_functions_and_classes_of_cells_is_known_in_ranks(kernel):
    kernel.run("class Point:\n    pass\n\ndef work():\n    import inspect\n    return Point(), inspect.getsource(work)")
    ((_, text),) = kernel.run("r = launch(work, world_size=1)[0]\nprint(type(r[0]) is Point, r[1].splitlines()[0])")
    assert text == "True def work():\n"


def test_a_global_set_by_one_run_is_there_in_the_next(kernel):
    outputs = kernel.run(
        """
        def build():
            global model
            model = 10 + dist.get_rank()
        def use():
            return model
        with World(2) as world:
            world.run(build)
            print(world.run(use))"""
    )
    assert outputs == [("stdout", "[10, 11]\n")]


def test_an_interrupt_stops_the_cell_at_once_says_where_it_was_and_leaves_the_kernel_usable(kernel):
    kernel.run(
        "def work():\n    print('started')\n    if dist.get_rank() == 1:\n        time.sleep(1000)\n    dist.barrier()"
    )
    request = kernel.send("launch(work, world_size=3, timeout=None)")
    time.sleep(1)
    start = time.monotonic()
    kernel.manager.interrupt_kernel()
    outputs = kernel.result(request)
    assert time.monotonic() - start < 30  # the promise is a second; this bound only catches a hang
    assert outputs[0] == ("stdout", "[rank 0] started\n[rank 1] started\n[rank 2] started\n")
    kind, text = outputs[1]
    assert kind == "error" and "the call was interrupted, and its ranks are ended" in text
    assert "rank 1 was running, line 4 of the cell, in work: time.sleep(1000)" in text
    assert "ranks 0, 2 were waiting in barrier" in text and "worlds.py" not in text
    assert kernel.run("launch(dist.get_rank, world_size=2)") == [("value", "[0, 1]")]
    assert len(kernel.processes()) == 1  # the nursery


def test_an_interrupt_while_torch_is_being_imported_leaves_the_kernel_usable(tmp_path):
    kernel = Kernel(tmp_path)
    try:
        kernel.run("from course_utils.world import nursery; nursery._current.close(); nursery._current = None")
        request = kernel.send("launch(dist.get_rank, world_size=2)")
        time.sleep(0.3)
        kernel.manager.interrupt_kernel()
        assert "the call was interrupted while the ranks were being prepared" in kernel.result(request)[-1][1]
        assert kernel.run("launch(dist.get_rank, world_size=2)") == [("value", "[0, 1]")]
    finally:
        kernel.close()


def test_what_a_rank_has_started_ends_with_it(kernel):
    kernel.run(
        """
        def work():
            import subprocess
            subprocess.Popen(["sleep", "1000"])
            time.sleep(1000)"""
    )
    request = kernel.send("launch(work, world_size=2, timeout=None)")
    assert wait_until(lambda: [p.name() for p in kernel.processes()].count("sleep") == 2, 20)
    kernel.manager.interrupt_kernel()
    kernel.result(request)
    assert wait_until(lambda: len(kernel.processes()) == 1, 5), kernel.processes()


def test_a_killed_kernel_takes_every_rank_with_it(kernel):
    kernel.run("def stay():\n    dist.barrier()\nworld = World(3)\nworld.run(stay)")
    kernel.send("launch(lambda: time.sleep(1000), world_size=2, timeout=None)")
    assert wait_until(lambda: len(kernel.processes()) == 6, 20)  # the nursery, 3 kept ranks, 2 fresh ones
    os.kill(kernel.manager.provisioner.pid, signal.SIGKILL)
    assert wait_until(lambda: not kernel.processes(), 2), kernel.processes()
    assert [f for f in kernel.folder.rglob("*") if f.is_file() or f.is_socket()] == []


def test_a_restart_takes_every_rank_with_it_and_ranks_start_again(kernel):
    kernel.run("world = World(2)")
    before = kernel.processes()
    kernel.manager.restart_kernel(now=False)
    kernel.client.wait_for_ready(timeout=60)
    assert wait_until(lambda: not any(p.is_running() for p in before), 2)
    assert kernel.run("from course_utils import launch\nlaunch(lambda: 1, world_size=2)") == [("value", "[1, 1]")]


def test_a_killed_nursery_is_explained_and_replaced(kernel):
    kernel.run("world = World(2)")
    (nursery,) = [p for p in kernel.processes() if p.ppid() == kernel.manager.provisioner.pid]
    nursery.kill()
    assert wait_until(lambda: not kernel.processes(), 5)
    kind, text = kernel.run("world.run(dist.get_rank)")[-1]
    assert kind == "error" and "was lost: the process that starts ranks has ended" in text
    assert kernel.run("launch(dist.get_rank, world_size=2)") == [("value", "[0, 1]")]


def test_a_forgotten_world_ends_when_its_name_is_taken_for_another(kernel):
    kernel.run("world = World(3)")
    kernel.run("world = World(2)")
    assert wait_until(lambda: len(kernel.processes()) == 3, 5)


def test_the_line_that_asks_for_patience_comes_and_goes(kernel):
    kernel.run("from course_utils.world import nursery; nursery._current.close(); nursery._current = None")
    line, gone, value = kernel.run("launch(dist.get_rank, world_size=2)", allow_stdin=True)
    assert line[1].startswith("preparing the ranks: they import torch once per kernel")
    assert (gone, value) == (("value", ""), ("value", "[0, 1]"))
    kernel.run("nursery._current.close(); nursery._current = None")
    assert kernel.run("launch(dist.get_rank, world_size=2)", allow_stdin=False) == [("value", "[0, 1]")]


EVERY_FAULT = """
import os, signal, sys, time
import torch, torch.distributed as dist
from course_utils import RankError, World, launch

def ok(): dist.barrier()
def raises():
    if dist.get_rank(): raise ValueError
    dist.barrier()
def dies():
    if dist.get_rank(): os.kill(os.getpid(), signal.SIGKILL)
    dist.barrier()
def hangs():
    if dist.get_rank(): time.sleep(1000)
    dist.barrier()
def differs(): dist.all_reduce(torch.ones(1 + dist.get_rank()))
def has_children():
    import subprocess
    subprocess.Popen(["sleep", "1000"])
    if dist.get_rank(): raise ValueError
def has_workers():
    loader = torch.utils.data.DataLoader(torch.arange(8), num_workers=1, persistent_workers=True)
    return [len(loader) for _ in loader]

for fault in (ok, raises, dies, hangs, differs, has_children, has_workers):
    try:
        launch(fault, world_size=2, timeout=0.5 if fault is hangs else 60)
    except RankError as error:
        print(str(error).splitlines()[0])
left = World(2)
left.run(ok)
print("done", flush=True)
END
"""


@pytest.mark.parametrize("end", ["", "raise SystemExit(1)", "os.kill(os.getpid(), signal.SIGKILL)"])
def test_no_process_socket_or_file_is_left_after_every_fault_however_the_kernel_ends(tmp_path, end):
    mark = uuid.uuid4().hex
    environment = {**os.environ, "COURSE_TEST_MARK": mark, "TMPDIR": str(tmp_path)}
    done = subprocess.run(
        [sys.executable, "-c", EVERY_FAULT.replace("END", end)],
        env=environment,
        capture_output=True,
        text=True,
        timeout=120,
    )
    assert done.stdout.splitlines()[-1] == "done" and len(done.stdout.splitlines()) == 6, done
    assert done.stderr == ""
    assert wait_until(lambda: not marked(mark), 2), marked(mark)
    # importing torch.distributed.pipelining makes torch's own cache folder, one per user, wherever it is imported
    assert [f.name for f in tmp_path.iterdir() if not f.name.startswith("torchinductor_")] == []


@pytest.mark.slow
def test_thirty_kernels_at_once_get_in_nobodys_way(tmp_path):
    script = (
        "import torch.distributed as dist\nfrom course_utils import launch\nprint(launch(dist.get_rank, world_size=2))"
    )
    count = 30
    running = [
        subprocess.Popen([sys.executable, "-c", script], stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
        for _ in range(count)
    ]
    outputs = [p.communicate(timeout=280) for p in running]
    assert outputs == [("[0, 1]\n", "")] * count


def test_kernelspec_is_this_environments():
    spec = jupyter_client.kernelspec.get_kernel_spec("python3")
    assert json.dumps(spec.argv) and Path(sys.prefix) in Path(spec.resource_dir).parents
