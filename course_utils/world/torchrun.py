"""Under `torchrun`: `launch` joins the world that exists instead of starting one.

Every process runs the whole script. A call of `launch` runs the function on the first `world_size` of them, in a
default group of their own, and every process gets all results, so that the script goes on alike everywhere. Only
process 0 prints. Failures are torchrun's to handle: an exception ends its process, and torchrun ends the others.
"""

from __future__ import annotations

import contextlib
import datetime
import io
import os
import sys

from . import wire

_calls = 0
_told: set[int | str] = set()  # what was asked for and is not there: each is said once
_store = None


_PRESENT = "COURSE_UTILS_RANK" not in os.environ and all(
    name in os.environ for name in ("RANK", "WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT")
)


def present() -> bool:
    """True in a process that `torchrun`, or a cluster's launcher that sets the same variables, has started.

    Decided once: a cell that sets these variables later, for a group of its own, changes nothing.
    """
    return _PRESENT


def quiet() -> None:
    """What the script prints is printed once: by process 0."""
    if os.environ["RANK"] != "0":
        sys.stdout = open(os.devnull, "w", encoding="utf-8")


class JoinedWorld:
    """The first `size` processes of the world that is there, as one default group."""

    def __init__(self, size: int, device: str, seed: int, timeout: float | None, links=None):
        global _calls, _store
        import torch
        import torch.distributed as dist

        from .rank import FOREVER, seed_everything

        there, self.rank = int(os.environ["WORLD_SIZE"]), int(os.environ["RANK"])
        self.size = min(size, there)
        if size > there and self.rank == 0 and size not in _told:
            _told.add(size)
            print(f"[asked for {size} ranks, and this world has {there}: running on {there}]", flush=True)
        if links is not None and self.rank == 0 and "links" not in _told:
            _told.add("links")
            print("[links are emulated in a notebook's own ranks only: running on the links that are here]", flush=True)
        if _store is None:
            _store, _, _ = next(iter(dist.rendezvous("env://")))
        _calls += 1
        self.store = dist.PrefixStore(f"course_utils/{_calls}", _store)
        self.runs = 0
        self.sent: dict = {}
        wire._NAMESPACES.clear()
        wait = FOREVER if timeout is None else datetime.timedelta(seconds=timeout)
        self.store.set_timeout(wait)
        if self.rank >= self.size:
            return
        local, here = int(os.environ.get("LOCAL_RANK", 0)), int(os.environ.get("LOCAL_WORLD_SIZE", there))
        on_gpu = device == "cuda" or (device == "auto" and torch.cuda.device_count() >= here)
        if on_gpu:
            torch.cuda.set_device(local)
            torch.set_default_device(f"cuda:{local}")
        backend = "nccl" if on_gpu else "gloo"
        dist.init_process_group(backend, store=self.store, rank=self.rank, world_size=self.size, timeout=wait)
        seed_everything(seed)

    def run(self, fn, args, kwargs, stream: bool) -> list:
        self.runs += 1
        key = f"run/{self.runs}"
        # as on a notebook's ranks: the function gets copies, and the globals that earlier runs of this world left
        job, _ = wire.dumps((fn, args, kwargs), self.sent)
        if self.rank < self.size:
            fn, args, kwargs = wire.loads(job)
            printed = _Labelled(self.rank) if stream else io.StringIO()
            with contextlib.redirect_stdout(printed):
                value = fn(*args, **kwargs)
            printed.flush()
            text = "" if stream else printed.getvalue()
            self.store.set(f"{key}/{self.rank}", wire.dumps((value, text))[0])
        replies = [wire.loads(self.store.get(f"{key}/{rank}")) for rank in range(self.size)]
        for rank, (_, text) in enumerate(replies):
            for line in text.splitlines():
                print(f"[rank {rank}] {line.rpartition(chr(13))[2]}")
        self._everyone(key)
        return [value for value, _ in replies]

    def _everyone(self, key: str) -> None:
        """Wait until every process has read the results: the first may be the one that keeps them."""
        if self.store.add(f"{key}/read", 1) == int(os.environ["WORLD_SIZE"]):
            self.store.set(f"{key}/all", b"read")
        self.store.get(f"{key}/all")

    def close(self) -> None:
        import torch.distributed as dist

        if self.rank < self.size and dist.is_initialized():
            dist.destroy_process_group()


class _Labelled(io.TextIOBase):
    """Writes whole lines, labelled, to the process's own standard output as they come."""

    def __init__(self, rank: int):
        self.label, self.rest = f"[rank {rank}] ", ""

    def write(self, text: str) -> int:
        *lines, self.rest = (self.rest + text).split("\n")
        for line in lines:
            sys.__stdout__.write(f"{self.label}{line.rpartition(chr(13))[2]}\n")
        sys.__stdout__.flush()
        return len(text)

    def flush(self) -> None:
        if self.rest:
            self.write("\n")
