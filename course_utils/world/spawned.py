"""Ranks where processes can't be forked: each is a fresh interpreter (`multiprocessing`'s spawn).

Slower to start than the nursery's, otherwise the same. A rank's output is collected by a thread of its own there, since
anonymous pipes can't be handed to a fresh interpreter everywhere.
"""

from __future__ import annotations

import atexit
import faulthandler
import mmap
import multiprocessing
import os
import socket
import sys
import threading
import weakref
from multiprocessing import connection

from .nursery import BOARD_BYTES, RANK_ENVIRONMENT

_MARK = b"\x00\x1a\x00"


class SpawnedCrew:
    """The same face as `nursery.Crew`, over `multiprocessing.Process`."""

    def __init__(self, processes, conns, outputs):
        self.processes, self.conns, self.outputs = processes, conns, outputs
        self.endings: dict[int, tuple[int, dict]] = {}
        atexit.register(_end_all, weakref.ref(self))  # before multiprocessing's own, which would wait for the ranks

    @property
    def waitables(self) -> list:
        return [p.sentinel for rank, p in enumerate(self.processes) if rank not in self.endings]

    def read_endings(self) -> None:
        for rank, process in enumerate(self.processes):
            if rank not in self.endings and process.exitcode is not None:
                code = process.exitcode
                self.endings[rank] = (-code if code < 0 else code << 8, {})

    def kill(self) -> None:
        for process in self.processes:
            process.kill()
        for process in self.processes:
            process.join(5)
        self.read_endings()

    def wait(self, seconds: float) -> None:
        for process in self.processes:
            process.join(seconds)
        self.read_endings()

    def close(self) -> None:
        for process in self.processes:
            if process.is_alive():
                process.kill()
        for end in (*self.conns, *self.outputs):
            end.close()
        self.conns, self.outputs = [], []


def _end_all(crew) -> None:
    if crew() is not None:
        crew().kill()


def crew(size: int) -> SpawnedCrew:
    context = multiprocessing.get_context("spawn")
    listener = socket.create_server(("127.0.0.1", 0), backlog=512)
    processes, conns, outputs = [], [], []
    main = sys.modules["__main__"]
    kept = {name: main.__dict__.pop(name) for name in ("__file__", "__spec__") if name in main.__dict__}
    environment = dict(os.environ)
    os.environ.update(RANK_ENVIRONMENT, COURSE_UTILS_RANK="1")
    try:
        main.__spec__ = None  # a rank gets its functions by value: it must not run the caller's script again
        for rank in range(size):
            ours, theirs = context.Pipe()
            output, their_output = context.Pipe(duplex=False)
            process = context.Process(
                target=_main,
                args=(rank, size, theirs, their_output, listener if rank == 0 else listener.getsockname()[1]),
            )
            process.daemon = False
            process.start()
            theirs.close()
            their_output.close()
            processes.append(process)
            conns.append(ours)
            outputs.append(output)
    finally:
        os.environ.clear()
        os.environ.update(environment)
        main.__dict__.update(kept)
        listener.close()
    return SpawnedCrew(processes, conns, outputs)


def _main(rank: int, size: int, conn: connection.Connection, output, listener) -> None:
    reading, writing = os.pipe()
    os.dup2(writing, 1)
    os.dup2(writing, 2)
    os.close(writing)

    passed = threading.Event()

    def pump():
        while data := os.read(reading, 65536):
            output.send_bytes(data.replace(_MARK, b""))
            if data.endswith(_MARK):
                passed.set()

    def flush():  # everything printed so far is on its way to the kernel when this returns
        passed.clear()
        os.write(1, _MARK)
        passed.wait(1)

    threading.Thread(target=pump, daemon=True).start()
    faulthandler.enable(2)
    from . import rank as rank_module

    rank_module.main(rank, size, conn, listener, mmap.mmap(-1, 4096), mmap.mmap(-1, BOARD_BYTES), flush)
