"""The contract of `launch` and `World` where nothing goes wrong."""

import os
import random
import subprocess
import sys
import threading
import time

import numpy as np
import pytest
import torch
import torch.distributed as dist
from torch import nn

import course_utils
from course_utils import World, launch
from course_utils.world import exchange

MODULE_VALUE = 5


@pytest.fixture(scope="module")
def world():
    with World(3) as kept:
        yield kept


def total():
    x = torch.tensor([float(dist.get_rank())])
    dist.all_reduce(x)
    return x.item()


# ---------------------------------------------------------------- what can be sent, what comes back


def test_a_script_for_torchrun_stands_in_the_function():
    def script():
        assert dist.is_initialized()
        rank, size = dist.get_rank(), dist.get_world_size()
        assert (os.environ["RANK"], os.environ["WORLD_SIZE"]) == (str(rank), str(size))
        return rank, size, dist.get_backend()

    assert launch(script, world_size=3) == [(0, 3, "gloo"), (1, 3, "gloo"), (2, 3, "gloo")]


def test_results_come_back_in_rank_order():
    assert launch(total, world_size=4) == [6.0] * 4
    assert launch(lambda: dist.get_rank(), world_size=5) == [0, 1, 2, 3, 4]


def test_functions_lambdas_and_closures_take_arguments(world):
    base = 100

    def inner(x, *, y=0):
        return base + x + y + MODULE_VALUE + dist.get_rank()

    assert world.run(inner, 10, y=1) == [116, 117, 118]
    assert launch(lambda *a, **k: (a, k), 1, [2], world_size=1, key="v") == [((1, [2]), {"key": "v"})]


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.int64, torch.bool, torch.complex64])
def test_tensors_travel_both_ways_unchanged(world, dtype):
    sent = torch.arange(6).reshape(2, 3).to(dtype)
    for back in world.run(lambda t: {"same": [t, t[:, 1:]], "empty": t[:0], "scalar": t[0, 0]}, sent):
        assert torch.equal(back["same"][0], sent) and back["same"][0].dtype == dtype
        assert torch.equal(back["same"][1], sent[:, 1:])
        assert back["empty"].shape == (0, 3) and torch.equal(back["scalar"], sent[0, 0])


def test_a_slice_is_sent_without_the_storage_behind_it():
    from course_utils.world import wire

    whole = torch.zeros(1_000_000)
    assert len(wire.dumps(whole[:10])[0]) < 2000


def test_results_are_values_of_the_cpu_without_a_graph(world):
    def forward():
        weight = nn.Parameter(torch.ones(2))
        return weight, weight * 2

    weight, product = world.run(forward)[0]
    assert isinstance(weight, nn.Parameter) and weight.requires_grad
    assert not product.requires_grad and product.device.type == "cpu" and not product.is_shared()


def test_modules_travel_by_name_also_torch_ops():
    ops = torch.ops
    assert launch(lambda: ops.aten.add(1, 2), world_size=1) == [3]


def test_a_model_can_be_sent(world):
    model = nn.Linear(2, 1)
    for weight in world.run(lambda m: m.weight, model):
        assert torch.equal(weight, model.weight)


def test_an_instance_of_a_class_defined_beside_the_function_comes_back_as_that_class():
    class Point:
        def __init__(self, x):
            self.x = x

    back = launch(lambda: Point(dist.get_rank()), world_size=2)
    assert all(isinstance(p, Point) for p in back) and [p.x for p in back] == [0, 1]


def test_a_module_beside_the_notebook_can_be_imported_in_ranks(tmp_path, monkeypatch):
    (tmp_path / "beside_the_notebook.py").write_text("def seven():\n    return 7\n")
    (tmp_path / "data.txt").write_text("here")
    monkeypatch.syspath_prepend(str(tmp_path))
    monkeypatch.chdir(tmp_path)
    from beside_the_notebook import seven

    assert launch(seven, world_size=2) == [7, 7]
    assert launch(lambda: open("data.txt").read(), world_size=1) == ["here"]


def test_a_variable_set_in_the_kernel_is_seen_in_ranks_and_gone_when_taken_away(world, monkeypatch):
    monkeypatch.setenv("COURSE_TEST_VARIABLE", "on")
    assert world.run(lambda: os.environ.get("COURSE_TEST_VARIABLE")) == ["on"] * 3
    monkeypatch.delenv("COURSE_TEST_VARIABLE")
    assert world.run(lambda: os.environ.get("COURSE_TEST_VARIABLE")) == [None] * 3


def test_torch_distributed_debug_reaches_the_group_of_a_fresh_world(monkeypatch):
    monkeypatch.setenv("TORCH_DISTRIBUTED_DEBUG", "DETAIL")
    assert launch(lambda: str(dist.get_debug_level()), world_size=2) == ["DebugLevel.DETAIL"] * 2


# ---------------------------------------------------------------- fresh worlds and kept ones


def test_every_launch_is_a_fresh_world():
    def leave_something():
        before = hasattr(torch, "left_behind")
        torch.left_behind = True
        return before, os.getpid()

    first, second = launch(leave_something, world_size=2), launch(leave_something, world_size=2)
    assert [seen for seen, _ in first + second] == [False] * 4
    assert {pid for _, pid in first}.isdisjoint(pid for _, pid in second)


def test_the_seed_is_the_same_on_every_rank_and_in_every_launch():
    def draw():
        return torch.rand(1).item(), random.random(), float(np.random.rand())

    first, second, other = (launch(draw, world_size=2, seed=s) for s in (0, 0, 1))
    assert first[0] == first[1] == second[0] == second[1] != other[0]


def test_a_kept_world_keeps_its_ranks_their_group_and_what_a_function_leaves():
    def build():
        global model
        model = nn.Linear(3, 3)
        return os.getpid()

    def use():
        return os.getpid(), model.weight.shape[0], total()

    with World(2) as kept:
        pids = kept.run(build)
        assert kept.run(use) == [(pid, 3, 1.0) for pid in pids]


steps = 0
setting = {"lr": 0.1}


def test_a_global_is_sent_when_it_changes_here_and_not_over_what_a_rank_has_made_of_it():
    def step():
        global steps
        steps += 1
        return steps, setting["lr"]

    global steps
    with World(1) as kept:
        assert [kept.run(step)[0] for _ in range(3)] == [(1, 0.1), (2, 0.1), (3, 0.1)]
        setting["lr"] = 0.5
        steps = 10
        assert kept.run(step) == [(11, 0.5)]
    steps, setting["lr"] = 0, 0.1


def test_functions_of_two_namespaces_keep_their_own_globals():
    spaces = [{"__name__": "__main__", "rate": rate} for rate in (0.1, 0.5)]
    for space in spaces:
        exec("def read():\n    return rate", space)
    first, second = (space["read"] for space in spaces)
    assert launch(lambda: (first(), second()), world_size=1) == [(0.1, 0.5)]


def test_two_threads_can_use_one_world(world):
    results = {}
    names = "abcd"
    threads = [threading.Thread(target=lambda n=n: results.update({n: world.run(lambda x: x, n)})) for n in names]
    for t in threads:
        t.start()
    for t in threads:
        t.join(60)
    assert results == {n: [n] * 3 for n in names}


def test_each_rank_has_one_thread(world):
    assert world.run(torch.get_num_threads) == [1] * 3
    assert world.run(lambda: os.environ["OMP_NUM_THREADS"]) == ["1"] * 3


def test_worlds_can_live_side_by_side():
    with World(2) as a, World(3) as b:
        assert (a.run(total), b.run(total), a.run(total)) == ([1.0] * 2, [3.0] * 3, [1.0] * 2)


def test_launch_works_from_several_threads_at_once():
    results = {}
    threads = [threading.Thread(target=lambda n=n: results.update({n: launch(total, world_size=n)})) for n in (1, 2, 3)]
    for t in threads:
        t.start()
    for t in threads:
        t.join(60)
    assert results == {1: [0.0], 2: [1.0] * 2, 3: [3.0] * 3}


def test_a_closed_world_says_so():
    kept = World(1)
    kept.close()
    kept.close()
    with pytest.raises(RuntimeError, match=r"this World is closed: make a new one with World\(1\)"):
        kept.run(total)


def test_a_data_loader_with_workers_and_a_data_set_of_the_cell_works_in_a_rank():
    def load():
        class Squares(torch.utils.data.Dataset):
            def __len__(self):
                return 4

            def __getitem__(self, i):
                return i * i

        return [int(x) for x in torch.utils.data.DataLoader(Squares(), num_workers=1)]

    assert launch(load, world_size=2) == [[0, 1, 4, 9]] * 2


# ---------------------------------------------------------------- the preloaded packages


def test_ddp_fsdp2_dtensor_and_pipelining_run_on_ranks():
    def all_of_them():
        from torch.distributed.fsdp import fully_shard
        from torch.distributed.pipelining import PipelineStage, ScheduleGPipe
        from torch.distributed.tensor import Replicate, Shard, distribute_tensor, init_device_mesh

        x = torch.ones(4, 8)
        ddp = nn.parallel.DistributedDataParallel(nn.Linear(8, 8))
        ddp(x).sum().backward()
        sharded = fully_shard(nn.Linear(8, 8))
        sharded(x).sum().backward()
        mesh = init_device_mesh("cpu", (2,))
        d = distribute_tensor(x, mesh, [Shard(0)])
        rank = dist.get_rank()
        stage = PipelineStage(nn.Linear(8, 8), rank, 2, torch.device("cpu"), input_args=x[:2], output_args=x[:2])
        schedule = ScheduleGPipe(stage, n_microbatches=2)
        out = schedule.step(x) if rank == 0 else schedule.step()
        return (
            ddp.module.weight.grad.shape[0],
            sharded.weight.grad.to_local().shape[0],
            torch.equal(d.redistribute(mesh, [Replicate()]).to_local(), x),
            None if out is None else tuple(out.shape),
        )

    assert launch(all_of_them, world_size=2) == [(8, 4, True, None), (8, 4, True, (4, 8))]


def test_what_ranks_preload_is_really_imported():
    from course_utils.world.nursery import PRELOAD

    assert launch(lambda: [name for name in PRELOAD if name not in sys.modules], world_size=1) == [[]]


# ---------------------------------------------------------------- what may be asked for


@pytest.mark.parametrize(
    "size, error, words",
    [
        (0, ValueError, "world_size=0: a world has at least one rank"),
        (-1, ValueError, "world_size=-1: a world has at least one rank"),
        (1.5, TypeError, "world_size=1.5 is a float: expected a whole number"),
        ("4", TypeError, "world_size='4' is a str: expected a whole number"),
        (True, TypeError, "world_size=True is a bool: expected a whole number"),
        (None, TypeError, "world_size=None is a NoneType: expected a whole number"),
        (1000, ValueError, "world_size=1000: at most 120 ranks .* torchrun"),
    ],
)
def test_a_world_size_that_makes_no_sense_is_refused_by_name(size, error, words):
    with pytest.raises(error, match=words):
        launch(total, world_size=size)


@pytest.mark.parametrize("size", [1, np.int64(2), 65])
def test_any_sensible_world_size_is_served(size):
    assert launch(total, world_size=size) == [sum(range(size))] * int(size)


@pytest.mark.parametrize(
    "options, error, words",
    [
        ({"device": "gpu"}, ValueError, "device='gpu': expected 'auto' .* 'cpu' or 'cuda'"),
        ({"timeout": -1}, ValueError, "timeout=-1: expected a positive number of seconds"),
        ({"timeout": float("nan")}, ValueError, "timeout=nan: expected a positive number of seconds"),
        ({"timeout": "5"}, TypeError, "timeout='5': expected a number of seconds"),
    ],
)
def test_bad_options_are_refused_by_name(options, error, words):
    with pytest.raises(error, match=words):
        launch(total, world_size=1, **options)


def test_a_result_instead_of_a_function_is_refused_with_the_way_to_do_it():
    with pytest.raises(TypeError, match="is no function: pass the function itself, without calling it"):
        launch(6.0, world_size=2)


@pytest.mark.skipif(torch.cuda.device_count() >= 100, reason="this machine has 100 GPUs")
def test_more_gpus_than_there_are_is_a_clear_error():
    with pytest.raises(
        ValueError, match=r"device='cuda' with world_size=100 needs 100 GPUs, one for each rank, and this"
    ):
        launch(total, world_size=100, device="cuda")


def test_the_cpu_can_be_asked_for():
    assert launch(lambda: (dist.get_backend(), str(torch.ones(1).device)), world_size=1, device="cpu") == [
        ("gloo", "cpu")
    ]


def test_launch_inside_a_rank_says_what_is_wrong():
    def nested():
        from course_utils import launch as again

        try:
            again(total, world_size=1)
        except RuntimeError as error:
            return str(error)

    assert "launch was called inside a rank" in launch(nested, world_size=1)[0]


def test_the_older_names_of_torch_are_known_by_the_new_ones_in_ranks(world):
    assert (
        world.run(lambda: hasattr(dist, "all_gather_single") and hasattr(dist, "reduce_scatter_single")) == [True] * 3
    )


# ---------------------------------------------------------------- what ranks print


def test_lines_are_labelled_and_in_rank_order_whatever_the_timing(capsys):
    def talk():
        rank = dist.get_rank()
        time.sleep(0.05 * (2 - rank))
        print("first\nsecond")
        print("no newline", end="")

    launch(talk, world_size=3)
    lines = capsys.readouterr().out.splitlines()
    assert lines == [f"[rank {r}] {text}" for r in range(3) for text in ("first", "second", "no newline")]


def test_standard_error_and_output_of_child_processes_are_caught_too(capfd):
    def talk():
        print("to stderr", file=sys.stderr)
        subprocess.run(["echo", "from a child"], check=True)

    launch(talk, world_size=1)
    out, err = capfd.readouterr()
    assert out == "[rank 0] to stderr\n[rank 0] from a child\n" and err == ""


def test_stream_shows_lines_as_they_come():
    class Clock(list):
        def write(self, text):
            if text.strip():
                self.append((time.monotonic(), text))

        def flush(self):
            pass

    def talk():
        print("early")
        time.sleep(0.5)
        print("late")

    clock, sys.stdout = Clock(), sys.stdout
    try:
        sys.stdout, clock = clock, sys.stdout
        launch(talk, world_size=1, stream=True)
    finally:
        sys.stdout, clock = clock, sys.stdout
    (t_early, early), (t_late, late) = clock
    assert (early, late) == ("[rank 0] early", "[rank 0] late") and t_late - t_early > 0.3


def test_of_a_progress_bar_only_the_last_state_is_a_line(capsys):
    def bar():
        from tqdm import tqdm

        for _ in tqdm(range(5), bar_format="{n_fmt}/{total_fmt}"):
            pass

    launch(bar, world_size=2)
    assert capsys.readouterr().out == "[rank 0] 5/5\n[rank 1] 5/5\n"


def test_a_flood_of_lines_is_cut_in_the_middle_and_says_so(capsys):
    launch(lambda: print("\n".join(map(str, range(5000)))), world_size=1)
    lines = capsys.readouterr().out.splitlines()
    assert lines[0] == "[rank 0] 0" and lines[-1] == "[rank 0] 4999" and len(lines) == 2001
    assert lines[1000] == "[rank 0] ... 3,000 lines are left out here; stream=True shows all of them"


def test_bytes_that_are_no_text_do_no_harm(capsys):
    launch(lambda: os.write(1, b"\xff\xfe ok\n"), world_size=1)
    assert capsys.readouterr().out.endswith(" ok\n")


# ---------------------------------------------------------------- what importing costs


def test_importing_the_package_brings_no_torch():
    code = "import sys, course_utils; sys.exit('torch' in sys.modules or 'course_utils.world' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0


def test_launch_does_not_need_torch_in_the_kernel():
    code = "import sys; from course_utils import launch; r = launch(lambda: 3, world_size=2); "
    code += "sys.exit(0 if r == [3, 3] and 'torch' not in sys.modules else 1)"
    assert subprocess.run([sys.executable, "-c", code], check=False, timeout=120).returncode == 0


def test_the_package_names_what_it_has():
    assert {"launch", "World", "RankError", "RankTimeout"} <= set(dir(course_utils))
    with pytest.raises(AttributeError, match="no attribute 'lanch'"):
        course_utils.lanch  # noqa: B018


@pytest.mark.parametrize("start", ["fork", "spawn"])
def test_a_plain_script_without_a_main_guard_works(tmp_path, start):
    (tmp_path / "script.py").write_text(
        "from course_utils import launch\nimport torch.distributed as dist\n"
        "def rank(x):\n    print('hello')\n    return x + dist.get_rank()\n"
        "print(launch(rank, 10, world_size=2))\n"
    )
    done = subprocess.run(
        [sys.executable, "script.py"],
        cwd=tmp_path,
        env={**os.environ, "COURSE_UTILS_START": start},
        capture_output=True,
        text=True,
        timeout=180,
    )
    assert (done.stdout, done.stderr) == ("[rank 0] hello\n[rank 1] hello\n[10, 11]\n", "")


OFFLINE = """
import fcntl, socket, struct
with socket.socket() as s:  # as `ip link set lo up`
    fcntl.ioctl(s, 0x8914, struct.pack("16sH14s", b"lo", 0x41, b""))
import torch.distributed as dist
from course_utils import launch
print(launch(dist.get_rank, world_size=2))
"""


@pytest.mark.skipif(not sys.platform.startswith("linux"), reason="network namespaces are Linux's")
def test_ranks_need_no_network_and_say_nothing_of_it():
    namespace = ["unshare", "--net"] if os.geteuid() == 0 else ["unshare", "--map-root-user", "--net"]
    try:
        allowed = subprocess.run([*namespace, "true"], capture_output=True, check=False).returncode == 0
    except FileNotFoundError:
        allowed = False
    if not allowed:
        pytest.skip("this machine lets nobody make a network namespace (unshare)")
    done = subprocess.run(
        [*namespace, sys.executable, "-c", OFFLINE], capture_output=True, text=True, timeout=120, check=False
    )
    assert (done.stdout, done.stderr) == ("[0, 1]\n", "")


def run_script(text: str, seconds: int = 120, **environment) -> tuple[int, str, str]:
    done = subprocess.run(
        [sys.executable, "-c", "import os, sys, threading, time\nimport torch.distributed as dist\n" + text],
        env={**os.environ, **environment}, capture_output=True, text=True, timeout=seconds, check=False,
    )  # fmt: skip
    return done.returncode, done.stdout, done.stderr


def test_a_script_with_an_open_world_ends_also_where_ranks_are_spawned():
    script = "from course_utils import World\nworld = World(2)\nprint(world.run(dist.get_rank))"
    assert run_script(script, COURSE_UTILS_START="spawn") == (0, "[0, 1]\n", "")
    assert run_script(script) == (0, "[0, 1]\n", "")


def test_the_first_calls_may_come_from_several_threads():
    script = "from course_utils import launch\nout = []\n"
    script += (
        "ts = [threading.Thread(target=lambda: out.append(launch(dist.get_rank, world_size=2))) for _ in range(3)]\n"
    )
    script += "[t.start() for t in ts]; [t.join(100) for t in ts]; print(out)"
    assert run_script(script) == (0, "[[0, 1], [0, 1], [0, 1]]\n", "")


def test_ranks_start_where_the_system_has_no_files_in_memory(tmp_path):
    (tmp_path / "sitecustomize.py").write_text("import os\nif hasattr(os, 'memfd_create'):\n    del os.memfd_create\n")
    script = "from course_utils import launch\nprint(launch(dist.get_rank, world_size=3))"  # as on macOS
    assert run_script(script, PYTHONPATH=str(tmp_path)) == (0, "[0, 1, 2]\n", "")


def test_variables_of_a_group_of_ones_own_in_the_kernel_change_nothing():
    script = "from course_utils import launch\nprint(launch(dist.get_rank, world_size=2))\n"
    script += "os.environ.update(RANK='0', WORLD_SIZE='1', MASTER_ADDR='127.0.0.1', MASTER_PORT='1')\n"
    script += "print(launch(dist.get_rank, world_size=3))"
    assert run_script(script) == (0, "[0, 1]\n[0, 1, 2]\n", "")


@pytest.mark.skipif(not hasattr(os, "fork"), reason="processes can't be forked here")
def test_a_kernel_that_forks_still_takes_its_ranks_with_it():
    script = """
from course_utils import World
world = World(2)
print(*world.run(os.getpid), flush=True)
if os.fork() == 0:
    time.sleep(20)
    os._exit(0)
os.kill(os.getpid(), 9)
"""
    started = subprocess.Popen([sys.executable, "-c", "import os, time\n" + script], stdout=subprocess.PIPE, text=True)
    pids = [int(pid) for pid in started.stdout.readline().split()]
    started.wait(60)
    end = time.monotonic() + 5
    while any(os.path.exists(f"/proc/{pid}") for pid in pids) and time.monotonic() < end:
        time.sleep(0.05)
    assert len(pids) == 2 and not any(os.path.exists(f"/proc/{pid}") for pid in pids)


def reduce_for(seconds: float) -> None:
    end = time.monotonic() + seconds
    while True:
        go_on = torch.tensor(float(time.monotonic() < end))
        dist.all_reduce(go_on, op=dist.ReduceOp.MIN)
        if not go_on:
            return


def test_a_call_that_ends_while_it_is_looked_at_is_no_hang(monkeypatch):
    """What a rank has called is asked of one after the other, and a rank that has answered goes on, and may be done."""
    monkeypatch.setattr(exchange, "FIRST_LOOK", 0.03)
    with World(4, device="cpu") as world:
        for attempt in range(80):
            assert world.run(reduce_for, 0.025 + 0.0002 * attempt) == [None] * 4
