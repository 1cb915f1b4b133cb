"""How long from the call until four ranks have done one all-reduce and the result is back: ours beside the others.

    make bench

Every way runs in a Python of its own, one after the other, in this one run: the ratios say something, the seconds only
something about this machine. `first` is the first call in a fresh process, without what the kernel has imported by then
anyway (torch); `again` is the median of the repeated calls.
"""

from __future__ import annotations

import json
import os
import socket
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path

RANKS = 4
PRELOADED = "import numpy, torch, torch.distributed.tensor.parallel, torch.distributed.fsdp, torch.distributed.pipelining, \
torch.distributed.optim, torch.distributed.algorithms.join, torch.nn.parallel, torch.utils.data"


def total():
    import torch
    import torch.distributed as dist

    x = torch.tensor([float(dist.get_rank())])
    dist.all_reduce(x)
    return x.item()


def free_port() -> int:
    with socket.create_server(("127.0.0.1", 0)) as s:
        return s.getsockname()[1]


def in_a_group(rank, size, port, answer):
    """What a script has to do that starts its processes itself."""
    import torch
    import torch.distributed as dist

    torch.set_num_threads(1)
    dist.init_process_group("gloo", init_method=f"tcp://127.0.0.1:{port}", rank=rank, world_size=size)
    Path(answer, str(rank)).write_text(str(total()))
    dist.destroy_process_group()


def from_the_environment(answer):
    import torch
    import torch.distributed as dist

    torch.set_num_threads(1)
    dist.init_process_group("gloo")
    Path(answer, str(dist.get_rank())).write_text(str(total()))
    dist.destroy_process_group()


def read(answer: str) -> list[float]:
    return [float(Path(answer, str(rank)).read_text()) for rank in range(RANKS)]


# ---------------------------------------------------------------- the ways: each a generator of one result per call


def launch_fresh():
    from course_utils import launch

    while True:
        yield launch(total, world_size=RANKS)


def world_kept():
    from course_utils import World

    with World(RANKS) as world:
        while True:
            yield world.run(total)


def multiprocessing_spawn():
    import torch.multiprocessing as mp

    while True:
        with tempfile.TemporaryDirectory() as answer:
            mp.spawn(in_a_group, (RANKS, free_port(), answer), nprocs=RANKS)
            yield read(answer)


def torchrun():
    while True:
        with tempfile.TemporaryDirectory() as answer:
            command = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", str(RANKS)]
            environment = {**os.environ, "OMP_NUM_THREADS": "1"}
            subprocess.run([*command, __file__, "as-torchrun", answer], check=True, env=environment, capture_output=True)
            yield read(answer)


def notebook_launcher():
    import contextlib
    import io

    from accelerate import notebook_launcher as start

    while True:
        with tempfile.TemporaryDirectory() as answer:
            with contextlib.redirect_stdout(io.StringIO()):
                start(from_the_environment, (answer,), num_processes=RANKS, use_port=str(free_port()))
            yield read(answer)


def ipyparallel():
    import ipyparallel

    def join(rank, port):
        import torch
        import torch.distributed as dist

        torch.set_num_threads(1)
        dist.init_process_group("gloo", init_method=f"tcp://127.0.0.1:{port}", rank=rank, world_size=4)

    with ipyparallel.Cluster(n=RANKS, log_level=50) as client:
        port = free_port()
        for request in [client[i].apply_async(join, i, port) for i in range(RANKS)]:
            request.get()
        while True:
            yield client[:].apply_sync(total)


WAYS = {
    "World.run, ranks kept": (world_kept, 30),
    "launch, fresh ranks": (launch_fresh, 15),
    "ipyparallel, group kept": (ipyparallel, 30),
    "accelerate notebook_launcher": (notebook_launcher, 8),
    "torch.multiprocessing spawn": (multiprocessing_spawn, 2),
    "torchrun": (torchrun, 2),
}


def measure(name: str) -> None:
    """In a process of its own: print the seconds of the first call and of the repeated ones."""
    way, repeats = WAYS[name]
    seconds = []
    start = time.perf_counter()
    calls = way()
    for _ in range(repeats + 1):
        assert next(calls) == [6.0] * RANKS
        seconds.append(time.perf_counter() - start)
        start = time.perf_counter()
    calls.close()
    print(json.dumps(seconds))


def main() -> None:
    def run(*arguments: str) -> str:
        done = subprocess.run([sys.executable, *arguments], capture_output=True, text=True, check=False)
        if done.returncode:
            sys.exit(done.stderr)
        return done.stdout

    imports = []
    for _ in range(3):
        start = time.perf_counter()
        run("-c", PRELOADED)
        imports.append(time.perf_counter() - start)
    importing = statistics.median(imports)

    first, again = {}, {}
    for name in WAYS:
        seconds = json.loads(run(__file__, "measure", name).splitlines()[-1])
        first[name], again[name] = seconds[0], statistics.median(seconds[1:])

    ours_kept, ours_fresh, *others = WAYS
    print(f"{RANKS} ranks on {os.cpu_count()} cores, seconds (and how many times World.run's repeated call)\n")
    for name in WAYS:
        print(f"{name:30}  first {first[name]:7.3f}   again {again[name]:8.4f}  {again[name] / again[ours_kept]:8.1f} x")
    print(f"{'importing the preloaded':30}        {importing:7.3f}\n")
    best = min(again[name] for name in others)
    best_fresh = min(again[name] for name in others if "kept" not in name)
    print(f"World.run   {1e3 * again[ours_kept]:.1f} ms (expected under 15), the best other takes {best / again[ours_kept]:.1f} times that (2)")
    print(f"launch      {again[ours_fresh]:.3f} s (expected under 0.2), the best other with fresh ranks {best_fresh / again[ours_fresh]:.1f} times that (1)")
    print(f"first call  {first[ours_fresh] / importing:.2f} times the imports (expected at most 1.3)")


if __name__ == "__main__":
    match sys.argv[1:]:
        case ["measure", name]:
            measure(name)
        case ["as-torchrun", answer]:
            from_the_environment(answer)
        case _:
            main()
