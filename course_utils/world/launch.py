"""`launch` and `World`: the kernel's side of live ranks."""

from __future__ import annotations

import contextlib
import inspect
import math
import operator
import os
import pickle
import sys
import threading
import time
from multiprocessing import connection
from typing import Any

from . import frames, nursery, report, torchrun, wire
from .output import Output, status_line

GRACE = 0.25  # seconds that the other ranks have to fail or finish by themselves once one has failed
FIRST_LOOK = 1.0  # seconds after which a call that isn't back is looked at, then after 3, 9, ... seconds
JOINING = 120.0  # seconds that the ranks may take to find each other
DRAINING = 1.0  # seconds
MOST_RANKS = 120


class RankError(RuntimeError):
    """A rank failed, or the ranks did not do the same thing.

    Attributes:
        rank: the rank that failed first; None if none did by itself.
        error_type: the name of the exception it raised; None if it raised none.
    The text is the whole report.
    """

    def __init__(self, text: str, rank: int | None = None, error_type: str | None = None):
        super().__init__(text)
        self.rank = rank
        self.error_type = error_type

    def _render_traceback_(self):  # what a notebook shows: the report, not the way through this package
        return f"{type(self).__name__}: {self}".splitlines()


class RankTimeout(RankError):
    """The ranks waited for each other, until the deadline or without any hope; the text says where every rank was."""


class Interrupted(KeyboardInterrupt):
    """The user interrupted a call; its ranks are ended. The text says where they were."""

    _render_traceback_ = RankError._render_traceback_


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
        exchange = _Exchange(self._crew, self._joined, stream)
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


# ---------------------------------------------------------------- one call: everything that comes back


class _Exchange:
    """One call on a crew: collects replies and output until every rank has answered, or it is clear that some won't."""

    def __init__(self, crew, joined: set[int], stream: bool):
        self.crew, self.joined = crew, joined
        self.size = len(crew.conns)
        self.outputs = [Output(rank, stream) for rank in range(self.size)]
        self.replies: dict[int, tuple[str, dict]] = {}
        self.places: dict[int, dict] = {}  # answers to "where"
        self.lost: dict[int, float] = {}  # rank -> when its connection ended
        self.refused: Exception | None = None
        self.timed_out = False
        self.hopeless = False

    def collect(self, seconds: float) -> None:
        """Until all is in, or `seconds` have passed since the last rank joined the group."""
        trouble = math.inf  # when the first failure was seen
        start = None
        deadline = next_look = time.monotonic() + JOINING
        while True:
            missing = [r for r in range(self.size) if r not in self.replies and r not in self.lost]
            if not missing or self.refused:
                break
            if start is None and len(self.joined) == self.size:
                start = time.monotonic()
                deadline, next_look = start + seconds, start + FIRST_LOOK
            until = min(deadline, trouble + GRACE, next_look)
            left = until - time.monotonic()
            if left > 0:
                self._wait(None if left == math.inf else left)
            elif (
                until == next_look and start is not None
            ):  # the ranks are slow: is it certain that they can't ever finish?
                if report.mismatch(self.fates(asking=missing)):
                    self.hopeless = True
                    break
                next_look = time.monotonic() + 2 * (time.monotonic() - start)
            else:
                self.timed_out = trouble == math.inf
                break
            if trouble == math.inf and (self.lost or any(kind == "raised" for kind, _ in self.replies.values())):
                trouble = time.monotonic()
        if self.lost:
            self._until(lambda: set(self.lost) <= set(self.crew.endings), 1)
        self._drain()

    def _until(self, condition, seconds: float) -> None:
        end = time.monotonic() + seconds
        while not condition() and (left := end - time.monotonic()) > 0:
            self._wait(left)

    def _wait(self, seconds: float | None) -> None:
        sources: dict = {conn: ("reply", r) for r, conn in enumerate(self.crew.conns) if r not in self.lost}
        sources |= {out: ("output", r) for r, out in enumerate(self.crew.outputs) if not self.outputs[r].ended}
        waitables = self.crew.waitables
        for ready in connection.wait([*sources, *waitables], seconds):
            if ready in waitables:
                self.crew.read_endings()
                continue
            what, rank = sources[ready]
            if what == "output":
                self.outputs[rank].read(ready)
            else:
                self._reply(rank, ready)

    def _reply(self, rank: int, conn) -> None:
        try:
            kind, content = pickle.loads(conn.recv_bytes())
        except (EOFError, OSError):
            self.lost.setdefault(rank, time.monotonic())
            return
        if kind == "where":
            self.places[rank] = content
        elif kind == "refused":
            kinds = {"ValueError": ValueError}
            self.refused = kinds.get(content["type"], RuntimeError)(report.clean(content["text"]))
        elif kind == "joined":
            self.joined.add(rank)
        else:
            self.replies[rank] = (kind, content)

    def _drain(self) -> None:
        """Everything that was printed before the answer is in the pipe by now; who goes on printing is cut off."""
        end = time.monotonic() + DRAINING
        for rank, out in enumerate(self.crew.outputs):
            while not self.outputs[rank].ended and connection.wait([out], 0) and time.monotonic() < end:
                self.outputs[rank].read(out)

    def print(self) -> None:
        for output in self.outputs:
            output.print()

    def ask_where(self, ranks, lines: bool, seconds: float) -> None:
        """Ask ranks where they are; `lines` adds the line of each collective, which is slow."""
        self.places = {}
        if not ranks:
            return
        message = pickle.dumps(("where", {"frames": lines}))
        asked = [r for r in ranks if r not in self.lost]
        for rank in asked:
            with contextlib.suppress(OSError):
                self.crew.conns[rank].send_bytes(message)
        self._until(lambda: all(r in self.places or r in self.lost for r in asked), seconds)

    # ------------------------------------------------------------ what to say of it

    def problem(self, timeout) -> RankError | None:
        """The error to raise for this call; None if every rank returned and all called the same collectives."""
        missing = [r for r in range(self.size) if r not in self.replies and r not in self.lost]
        fates = self.fates(asking=missing)
        different = report.mismatch(fates) is not None
        if different:  # once more, with the line of each collective: slow, and worth it now
            fates = self.fates(asking=range(self.size), lines=True)
        difference = report.difference(fates)
        if difference or (different and all(fate.kind == "returned" for fate in fates)):
            return RankError(f"no result, for it would be wrong: {difference or report.mismatch(fates)}")
        if self.hopeless:
            return RankTimeout(report.stuck(fates))
        if self.timed_out:
            return RankTimeout(report.hang(fates, timeout))
        if any(fate.kind != "returned" for fate in fates):
            first, text = report.failure(fates)
            return RankError(text, first.rank, first.error.get("type"))
        return None

    def interrupted(self) -> str:
        fates = self.fates(asking=range(self.size), seconds=0.3)
        self._drain()
        return report.interrupted(fates)

    def fates(self, asking, lines: bool = False, seconds: float = 1) -> list[report.Fate]:
        self.ask_where(asking, lines, 10 if lines else seconds)
        return [self._fate(rank) for rank in range(self.size)]

    def _fate(self, rank: int) -> report.Fate:
        kind, content = self.replies.get(rank, (None, {}))
        place = self.places.get(rank, {})
        calls = {what: place.get(what) or content.get(what) or [] for what in ("records", "messages")}
        if kind == "done":
            return report.Fate(rank, "returned", **calls)
        if kind == "raised":
            return report.Fate(rank, "raised", content["time"], error=content, waits=content.get("waits"), **calls)
        if rank in self.lost:
            status, notes = self.crew.endings.get(rank, (0, {}))
            stack = frames.of_crash(notes.get("crash", ""))
            if not stack and notes.get("place"):
                stack = pickle.loads(notes["place"])
            return report.Fate(rank, "died", self.lost[rank], stack=stack, status=status, **calls)
        if rank in self.places:
            return report.Fate(rank, "running", stack=place["stack"], waits=place["waits"], **calls)
        return report.Fate(rank, "silent")


# ---------------------------------------------------------------- what may be asked for


def check_size(size) -> int:
    try:
        if isinstance(size, bool):
            raise TypeError
        size = operator.index(size)
    except TypeError:
        raise TypeError(
            f"world_size={size!r} is a {type(size).__name__}: expected a whole number of ranks, such as world_size=4"
        ) from None
    if size < 1:
        raise ValueError(f"world_size={size}: a world has at least one rank; try world_size=4")
    if size > MOST_RANKS:
        raise ValueError(
            f"world_size={size}: at most {MOST_RANKS} ranks can be started on one machine from a notebook, and a few "
            "per core run well; for more, export the notebook and run it under torchrun on several machines"
        )
    return size


def check_device(device) -> str:
    if device not in ("auto", "cpu", "cuda"):
        raise ValueError(
            f"device={device!r}: expected 'auto' (GPUs if there are enough, otherwise the CPU), 'cpu' or 'cuda'"
        )
    return device


def check_links(links, size: int, device: str) -> None:
    if not hasattr(links, "backend"):
        raise TypeError(
            f"links={links!r:.60}: expected a Link or a Node of course_utils.links, such as Link(alpha=1e-3, beta=1e-8)"
        )
    if device == "cuda":
        raise ValueError(
            "links are emulated between CPU ranks: leave device='cuda' out, or measure the GPUs' own links"
        )
    links.check(size)


def check_timeout(timeout) -> float | None:
    if timeout is None:
        return None
    try:
        if isinstance(timeout, (bool, str)):
            raise TypeError
        seconds = float(timeout)
    except (TypeError, ValueError):
        raise TypeError(f"timeout={timeout!r}: expected a number of seconds, or None for no limit") from None
    if not seconds > 0:
        raise ValueError(f"timeout={timeout!r}: expected a positive number of seconds, or None for no limit")
    return seconds


def check_function(fn, args, kwargs) -> None:
    if not callable(fn):
        raise TypeError(
            f"the first argument is {fn!r:.60}, which is no function: pass the function itself, without calling it, as "
            "in launch(work, world_size=4)"
        )
    try:
        signature = inspect.signature(fn)
    except (TypeError, ValueError):  # some built-in functions have none
        return
    try:
        signature.bind(*args, **kwargs)
    except TypeError as error:
        given = ", ".join([*(f"{a!r:.30}" for a in args), *(f"{k}={v!r:.30}" for k, v in kwargs.items())]) or "nothing"
        raise TypeError(
            f"{_name(fn)}{signature} is given {given}: {error} (what stands behind the function goes to it; the number "
            "of ranks is world_size=)"
        ) from None


def culprit(fn, args, kwargs) -> str:
    """Which part of a call can't be sent, in words."""

    def sendable(value) -> bool:
        try:
            wire.dumps(value)
        except wire.Unsendable:
            return False
        return True

    for i, value in enumerate(args):
        if not sendable(value):
            return f"argument {i + 1} of {_name(fn)}, a {type(value).__name__},"
    for name, value in kwargs.items():
        if not sendable(value):
            return f"the argument {name} of {_name(fn)}, a {type(value).__name__},"
    with contextlib.suppress(TypeError):
        used = inspect.getclosurevars(inspect.unwrap(fn))
        for name, value in {**used.globals, **used.nonlocals}.items():
            if not sendable(value):
                return f"{name}, a {type(value).__name__} that {_name(fn)} uses,"
    return _name(fn)


def _name(fn) -> str:
    return getattr(fn, "__name__", repr(fn))
