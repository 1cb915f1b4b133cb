"""How long from the call until four ranks have done one all-reduce and the result is back: ours beside the others.

    make bench

Every way runs in a Python of its own, one after the other, in this one run: the ratios say something, the seconds only
something about this machine. `first` is the first call in a fresh process, without what the kernel has imported by then
anyway (torch); `again` is the median of the repeated calls.
"""

from __future__ import annotations

import json
import math
import os
import signal
import socket
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path

RANKS = 4
ROUNDS = 2
LIMIT = 90  # seconds for one way in one round
SLOW = 2  # ways with so few repeats take many seconds a call, and one round is enough
IMPORTS = "importing the preloaded"
PRELOADED = (
    "import numpy, torch, torch.distributed.tensor.parallel, torch.distributed.fsdp, torch.distributed.pipelining, \
torch.distributed.optim, torch.distributed.algorithms.join, torch.nn.parallel, torch.utils.data"
)


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
            subprocess.run(
                [*command, __file__, "as-torchrun", answer], check=True, env=environment, capture_output=True
            )
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
        """What it prints; "[]" if it hangs (accelerate's launcher does, at times): the others are still measured."""
        command = [sys.executable, *arguments]
        pipes = dict(stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
        started = subprocess.Popen(command, **pipes, process_group=0)
        try:
            out, err = started.communicate(timeout=LIMIT)
        except subprocess.TimeoutExpired:
            os.killpg(started.pid, signal.SIGKILL)  # with the processes that it has forked
            started.communicate()
            print(f"{arguments[-1]}: no answer after {LIMIT} s, left out of this round", flush=True)
            return "[]"
        if started.returncode:
            sys.exit(err)
        return out

    first, again = {name: [] for name in (*WAYS, IMPORTS)}, {name: [] for name in WAYS}
    for repetition in range(ROUNDS):  # in turns, so that a busy moment of the machine hits all of them
        start = time.perf_counter()
        run("-c", PRELOADED)
        first[IMPORTS].append(time.perf_counter() - start)
        for name, (_, repeats) in WAYS.items():
            if repetition == 0 or repeats > SLOW:
                seconds = json.loads(run(__file__, "measure", name).splitlines()[-1])
                first[name] += seconds[:1]
                again[name] += seconds[1:]
    first = {name: statistics.median(seconds or [math.nan]) for name, seconds in first.items()}
    again = {name: statistics.median(seconds or [math.inf]) for name, seconds in again.items()}

    kept, fresh, *others = WAYS
    best = min(again[name] for name in others) / again[kept]
    best_fresh = min(again[name] for name in others if "kept" not in name) / again[fresh]
    print(f"{RANKS} ranks on {os.cpu_count()} cores, seconds (and how many times World.run's repeated call)\n")
    for name, seconds in again.items():
        print(f"{name:30}  first {first[name]:7.3f}   again {seconds:8.4f}  {seconds / again[kept]:8.1f} x")
    print(f"{IMPORTS:30}        {first[IMPORTS]:7.3f}\n")
    print(f"World.run   {1e3 * again[kept]:.1f} ms (expected under 15); the best other: {best:.1f} x that (at least 2)")
    print(f"launch      {again[fresh]:.3f} s (expected under 0.2); the best with fresh ranks: {best_fresh:.1f} x (1)")
    print(f"first call  {first[fresh] / first[IMPORTS]:.2f} x the imports (expected at most 1.3)")


if __name__ == "__main__":
    match sys.argv[1:]:
        case ["measure", name]:
            measure(name)
        case ["as-torchrun", answer]:
            from_the_environment(answer)
        case _:
            main()
