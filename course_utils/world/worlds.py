"""`launch` and `World`: the kernel's side of live ranks."""

from __future__ import annotations

import contextlib
import math
import os
import pickle
import sys
import threading
from typing import Any

from . import nursery, torchrun, wire
from .arguments import check_device, check_function, check_links, check_size, check_timeout, culprit
from .errors import Interrupted
from .exchange import Exchange
from .output import status_line


class World:
    """`size` ranks and their process group, kept between calls.

    The ranks run functions of the notebook as `torchrun` would run a script: the default process group is up, the seed
    is set, each has one thread. What a function leaves on its rank (`global model`) is there for the next `run`. After
    a failure the ranks are gone; make a new `World`. A variable of the notebook's that the function uses goes to the
    ranks when it is new or has changed in the notebook. What is sent must be received, and what is begun must be
    joined, within the same `run`.

    Args:
        size: the number of ranks.
        device: "auto" (a GPU per rank and NCCL if there are enough GPUs, otherwise CPU and Gloo), "cpu" or "cuda".
        seed: of torch, numpy and random, the same on every rank.
        timeout: seconds that one `run` may take before it is stopped and explained; None for no limit.
        links: a `Link` or `Node` of `course_utils.links`: CPU ranks whose communication takes the time it would there.

    Raises:
        TypeError, ValueError: `size` is no whole number of at least 1, or `device` is unknown. That there are too few
            GPUs is found by the first `run`, which raises the ValueError.

    >>> import torch, torch.distributed as dist
    >>> def total():
    ...     x = torch.tensor([float(dist.get_rank())])
    ...     dist.all_reduce(x)
    ...     return x.item()
    >>> with World(2) as world:
    ...     world.run(total)
    [1.0, 1.0]
    """

    def __init__(
        self, size: int = 4, *, device: str = "auto", seed: int = 0, timeout: float | None = 60, links: Any = None
    ):
        self.size = check_size(size)
        self.device = check_device(device)
        self.timeout = check_timeout(timeout)
        if links is not None:
            check_links(links, self.size, device)
        self._why_closed = ""
        self._busy = threading.Lock()  # one call at a time, from whatever thread
        self._sent: dict = {}  # which globals of the notebook's functions the ranks have
        self._environment: dict[str, str | None] = {}  # what they were told of the environment
        self._joined: set[int] = set()  # ranks that are in the group
        self._crew = None
        self._torchrun = None
        if torchrun.present():
            self._torchrun = torchrun.JoinedWorld(self.size, device, seed, self.timeout, links)
            self.size = self._torchrun.size
            return
        if os.environ.get("COURSE_UTILS_RANK"):
            raise RuntimeError(
                "launch was called inside a rank: ranks can't start ranks; call it from the notebook itself"
            )
        try:
            if not nursery.wait_until_ready(0.5):
                with status_line(
                    "preparing the ranks: they import torch once per kernel, which takes a few seconds ..."
                ):
                    nursery.wait_until_ready()
        except KeyboardInterrupt:
            raise Interrupted("the call was interrupted while the ranks were being prepared") from None
        self._crew = nursery.crew(self.size)
        links = links and wire.dumps(links)[0]
        self._broadcast("join", device=device, seed=seed, environment=self._changes(), links=links)

    def run(self, fn, *args, timeout: float | None = ..., stream: bool = False, **kwargs) -> list:
        """Call `fn(*args, **kwargs)` on every rank; return the results in rank order.

        Args:
            fn: any function, lambda or closure, also one defined in a cell. Tensors come back as CPU tensors.
            timeout: seconds, instead of the world's own.
            stream: print the ranks' lines as they come, instead of in rank order at the end.

        Raises:
            RankError: a rank raised or died, or the ranks' collectives did not match; the ranks are ended.
            RankTimeout: the deadline passed; the report says where every rank was.
        """
        return self._run(fn, args, kwargs, self.timeout if timeout is ... else check_timeout(timeout), stream)

    def _run(self, fn, args, kwargs, timeout, stream) -> list:
        check_function(fn, args, kwargs)
        if self._torchrun:
            return self._torchrun.run(fn, args, kwargs, stream)
        with self._busy:
            return self._call(fn, args, kwargs, timeout, stream)

    def _call(self, fn, args, kwargs, timeout, stream) -> list:
        if self._crew is None:
            raise RuntimeError(f"this World is closed{self._why_closed}: make a new one with World({self.size})")
        try:
            job, sources = wire.dumps((fn, args, kwargs), self._sent, sys.modules["__main__"].__dict__)
        except wire.Unsendable as error:
            raise TypeError(f"{culprit(fn, args, kwargs)} can't be sent to the ranks: {error}") from None
        exchange = Exchange(self._crew, self._joined, stream)
        try:
            self._broadcast(
                "run",
                job=job,
                sources=sources,
                cwd=os.getcwd(),
                path=list(sys.path),
                environment=self._changes(),
            )
            exchange.collect(math.inf if timeout is None else timeout)
            problem = exchange.refused or exchange.problem(timeout)
        except KeyboardInterrupt:
            problem = Interrupted(exchange.interrupted())
            self._end(" (its last call was interrupted)")
        except BaseException:
            self._end(" after the failure of its last call")
            raise
        exchange.print()
        if problem:
            self._end(" after the failure of its last call")
            raise problem from None
        return [wire.loads(exchange.replies[rank][1]["value"]) for rank in range(self.size)]

    def _changes(self) -> dict[str, str | None]:
        """What the kernel's environment has that the ranks don't know of yet, or has no longer."""
        now = nursery.changed_environment()
        back = {name: nursery.first_environment().get(name) for name in self._environment.keys() - now.keys()}
        self._environment = now
        return {**back, **now}

    def _broadcast(self, kind: str, **content) -> None:
        message = pickle.dumps((kind, content), protocol=5)
        for conn in self._crew.conns:
            with contextlib.suppress(OSError):  # its end is noticed where replies are collected
                conn.send_bytes(message)

    def _end(self, why: str) -> None:
        crew, self._crew = self._crew, None
        if crew is not None:
            self._why_closed = why
            try:
                crew.kill()
            finally:
                crew.close()

    def close(self) -> None:
        """End the ranks. A closed world can be closed again."""
        if self._torchrun:
            self._torchrun.close()
        elif self._crew is not None:
            crew, self._crew = self._crew, None
            message = pickle.dumps(("leave", {}))
            try:
                for conn in crew.conns:
                    with contextlib.suppress(OSError):
                        conn.send_bytes(message)
                crew.wait(2)
            finally:
                crew.close()

    def __enter__(self) -> World:
        return self

    def __exit__(self, *_) -> None:
        self.close()

    def __del__(self):
        with contextlib.suppress(Exception):
            if self._crew is not None:
                self._crew.close()

    def __repr__(self) -> str:
        return f"World({self.size}, device={self.device!r})" + ("" if self._crew or self._torchrun else " (closed)")


def launch(
    fn,
    *args,
    world_size: int = 4,
    device: str = "auto",
    timeout: float | None = 60,
    stream: bool = False,
    seed: int = 0,
    links: Any = None,
    **kwargs,
) -> list:
    """Call `fn(*args, **kwargs)` on `world_size` fresh ranks and return one result per rank, in rank order.

    Inside `fn` stands what would stand in a script for `torchrun`: the default process group is up, `dist.get_rank()`
    works, the seed is set. Nothing of an earlier call survives in a fresh world. Under `torchrun` the same call joins
    the world that is there.

    Args and errors: as for `World` and `World.run`. These names are `launch`'s own: for a function that has an argument
    `seed` or `timeout` itself, write `launch(lambda: fn(seed=3))`.

    >>> import torch.distributed as dist
    >>> launch(lambda base: base + dist.get_rank(), 10, world_size=2)
    [10, 11]
    """
    check_function(fn, args, kwargs)
    with World(world_size, device=device, seed=seed, timeout=timeout, links=links) as world:
        return world._run(fn, args, kwargs, world.timeout, stream)
