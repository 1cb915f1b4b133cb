"""Where ranks come from.

On Linux and macOS: one helper process, the nursery, imports torch once and forks a rank whenever it is asked to, which
takes milliseconds where a fresh interpreter takes seconds. Forking the kernel itself would be as fast, but is unsafe
once a kernel has used threads, autograd or CUDA. Elsewhere, every rank is a fresh interpreter (`multiprocessing`'s
spawn).

Nothing here has a name on disk or a number that could be taken: descriptors are passed over a socket pair, and the
ranks meet at a port that the system chose. Whoever dies closes its end of a socket, and that is how the others know:
- the kernel ends, however it ends: the nursery ends every rank, with all that it has started, and then itself;
- a crew's socket is closed: that crew's ranks are ended;
- the nursery ends: ranks get a death signal from the system (Linux) or read an end of file.
"""

from __future__ import annotations

import atexit
import contextlib
import ctypes
import faulthandler
import gc
import importlib
import mmap
import os
import pickle
import select
import signal
import socket
import subprocess
import sys
import tempfile
import threading
import traceback
import warnings
import weakref
from multiprocessing import connection

PRELOAD = (
    "numpy",
    "torch",
    "torch.distributed",
    "torch.distributed.device_mesh",
    "torch.distributed.tensor",
    "torch.distributed.tensor.parallel",
    "torch.distributed.fsdp",
    "torch.distributed.pipelining",
    "torch.distributed.algorithms.join",
    "torch.distributed.checkpoint",
    "torch.distributed.checkpoint.state_dict",
    "torch.distributed.optim",
    "torch.nn.parallel",
    "torch.utils.data",
)
RANK_ENVIRONMENT = {
    # one thread per rank, whatever library it is
    "OMP_NUM_THREADS": "1",
    "MKL_NUM_THREADS": "1",
    "OPENBLAS_NUM_THREADS": "1",
    "VECLIB_MAXIMUM_THREADS": "1",
    # torch's C++ warnings: the first is that 127.0.0.1's name can't be looked up, on every laptop without a network
    "TORCH_CPP_LOG_LEVEL": "ERROR",
    # torch's flight recorder: who called which collective with what; off unless set before the group exists. It is read
    # after every call, at 10 µs for each collective that it remembers.
    "TORCH_FR_BUFFER_SIZE": "256",
}
BOARD_BYTES = 2**27  # of memory that the ranks of a world share
if sys.platform != "win32":  # Gloo looks up the machine's name unless told where to listen, and an odd one breaks it
    RANK_ENVIRONMENT["GLOO_SOCKET_IFNAME"] = "lo0" if sys.platform == "darwin" else "lo"
_CAN_FORK = hasattr(os, "fork") and hasattr(socket, "send_fds")


LOST = -1  # instead of a wait status: the nursery has ended, or could not start this rank


class NurseryError(RuntimeError):
    """No rank can be started here; the text says why."""


class Crew:
    """The processes of one world, as seen from the kernel: a connection, an output and an ending per rank."""

    def __init__(self, conns, outputs, control):
        self.conns = conns  # one Connection per rank
        self.outputs = outputs  # one readable descriptor per rank, standard output and error together
        self.control = control  # the nursery's end reports here
        self.endings: dict[int, tuple[int, dict]] = {}  # rank -> (wait status, its last notes)
        self._buffer = b""

    @property
    def waitables(self) -> list:
        return [self.control] if self.control is not None else []

    def read_endings(self) -> None:
        """Take in what the nursery says of ranks that have ended."""
        while self.control is not None and select.select([self.control], [], [], 0)[0]:
            try:
                data = self.control.recv(65536)
            except OSError:
                data = b""
            if not data:  # the nursery is gone, and with it every rank
                for rank in range(len(self.conns)):
                    self.endings.setdefault(rank, (LOST, {}))
                self.control.close()
                self.control = None
                return
            self._buffer += data
            while len(self._buffer) >= 4:
                size = int.from_bytes(self._buffer[:4], "big")
                if len(self._buffer) < 4 + size:
                    break
                rank, status, notes = pickle.loads(self._buffer[4 : 4 + size])
                self._buffer = self._buffer[4 + size :]
                self.endings[rank] = (status, notes)

    def kill(self) -> None:
        """End the ranks that are left, and wait until they are gone."""
        if self.control is None:
            return
        try:
            self.control.sendall(b"K")
        except OSError:
            pass
        self.wait(5)

    def wait(self, seconds: float) -> None:
        """Wait until the ranks have ended by themselves."""
        while self.control is not None and len(self.endings) < len(self.conns):
            if not select.select([self.control], [], [], seconds)[0]:
                break
            self.read_endings()

    def close(self) -> None:
        """Let go of the ranks: those still alive end."""
        if self.control is not None:
            self.control.close()
            self.control = None
        for conn in self.conns:
            conn.close()
        for fd in self.outputs:
            if isinstance(fd, int):
                os.close(fd)
            else:
                fd.close()
        self.conns, self.outputs = [], []


# ---------------------------------------------------------------- in the kernel


class _Nursery:
    def __init__(self):
        self.pid = os.getpid()
        self.lock = threading.Lock()
        self.base_environment = dict(os.environ)
        self.socket, theirs = socket.socketpair()
        self.ready = False
        environment = {**os.environ, **RANK_ENVIRONMENT, "COURSE_UTILS_RANK": "1"}
        for name in ("TORCH_FR_BUFFER_SIZE", "TORCH_CPP_LOG_LEVEL"):  # the learner's own wish comes first
            if os.environ.get(name):
                environment[name] = os.environ[name]
        package = os.path.dirname(os.path.dirname(os.path.dirname(os.path.abspath(__file__))))
        start = f"import sys; sys.path[:] = {[package, *(p for p in sys.path if p and p != package)]!r}; "
        start += f"from course_utils.world import nursery; nursery.serve({theirs.fileno()})"
        # a process group of its own: an interrupt of the kernel's doesn't reach it
        self.process = subprocess.Popen(
            [sys.executable, "-c", start],
            pass_fds=[theirs.fileno()],
            process_group=0,
            stdin=subprocess.DEVNULL,
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
            env=environment,
        )
        theirs.close()

    def usable(self) -> bool:
        return self.pid == os.getpid() and self.process.poll() is None

    def wait_until_ready(self, timeout=None) -> bool:
        if not self.ready:
            if not select.select([self.socket], [], [], timeout)[0]:
                return False
            word = self.socket.recv(65536)
            if word != b"ready":
                reason = word.decode(errors="replace") or "its process ended while it was starting"
                raise NurseryError(f"ranks can't be started here: {reason}")
            self.ready = True
        return True

    def crew(self, size: int) -> Crew:
        ours, theirs = socket.socketpair()
        pipes = [connection.Pipe() for _ in range(size)]
        outputs = [os.pipe() for _ in range(size)]
        fds = [theirs.fileno()]
        for (_, conn), (_, out) in zip(pipes, outputs):
            fds += [conn.fileno(), out]
        try:
            with self.lock:
                socket.send_fds(self.socket, [size.to_bytes(4, "big")], fds)
        finally:
            theirs.close()
            for (_, conn), (_, out) in zip(pipes, outputs):
                conn.close()
                os.close(out)
        crew = Crew([conn for conn, _ in pipes], [out for out, _ in outputs], ours)
        _crews.add(crew)
        return crew

    def close(self) -> None:
        if self.pid == os.getpid():
            self.socket.close()
            try:
                self.process.wait(5)
            except subprocess.TimeoutExpired:
                self.process.kill()


_current: _Nursery | None = None
_lock = threading.RLock()
_crews: weakref.WeakSet[Crew] = weakref.WeakSet()


def _forget() -> None:
    """In a process that the kernel forked: the ranks are not its own, and must see that the kernel ends."""
    global _current, _lock
    _lock = threading.RLock()
    if _current is not None:
        _current.socket.close()
        _current = None
    for crew in list(_crews):
        crew.close()


if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_forget)


def forks() -> bool:
    return _CAN_FORK and os.environ.get("COURSE_UTILS_START", "fork") == "fork"


def warm() -> None:
    """Start the nursery, without waiting for it."""
    with _lock:
        _warm()


def _warm() -> None:
    global _current
    if forks() and (_current is None or not _current.usable()):
        if _current is None:
            atexit.register(lambda: _current is not None and _current.close())
        _current = _Nursery()


def wait_until_ready(timeout=None) -> bool:
    """True once ranks can be had at once; False when `timeout` seconds were not enough."""
    if not forks():
        return True
    global _current
    with _lock:
        warm()
        try:
            return _current.wait_until_ready(timeout)
        except NurseryError:
            _current = None  # the next call tries again, and hears the reason again
            raise


def first_environment() -> dict[str, str]:
    """The kernel's environment when the nursery started."""
    return dict(os.environ) if not forks() or _current is None else _current.base_environment


def changed_environment() -> dict[str, str | None]:
    """What the kernel's environment has now that the nursery's had not when it started (None: taken away)."""
    if not forks() or _current is None:
        return {}
    base, now = _current.base_environment, os.environ
    return {k: now.get(k) for k in {*base, *now} if base.get(k) != now.get(k)}


def crew(size: int) -> Crew:
    """`size` new ranks that wait for their first message."""
    if not forks():
        from . import spawned

        return spawned.crew(size)
    wait_until_ready()
    try:
        return _current.crew(size)
    except (BrokenPipeError, ConnectionResetError):  # it died just now: start another
        _current.process.kill()
        _current.process.wait()
        wait_until_ready()
        return _current.crew(size)


# ---------------------------------------------------------------- in the nursery


def _nameless_file() -> int:
    if hasattr(os, "memfd_create"):
        return os.memfd_create("crash")
    with tempfile.TemporaryFile() as file:  # macOS
        return os.dup(file.fileno())


class _Child:
    def __init__(self, control, rank):
        self.control, self.rank = control, rank
        self.place = mmap.mmap(-1, 4096)  # shared with the rank: where it is, for when it can no longer say so
        self.crash = _nameless_file()

    def notes(self) -> dict:
        size = int.from_bytes(self.place[:4], "big")
        place = self.place[4 : 4 + size] if size <= 4092 else b""
        os.lseek(self.crash, 0, os.SEEK_SET)
        return {"place": place, "crash": os.read(self.crash, 65536).decode(errors="replace")}

    def close(self) -> None:
        self.place.close()
        os.close(self.crash)


def serve(fd: int) -> None:
    """The nursery's whole life: import, then fork ranks and report their endings until the kernel is gone."""
    main = socket.socket(fileno=fd)
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    filters = list(warnings.filters)
    warnings.simplefilter("ignore")
    try:
        for name in (*PRELOAD, "course_utils.world.rank"):
            importlib.import_module(name)
    except BaseException as error:
        main.sendall(f"importing {name} failed with {type(error).__name__}: {error}".encode()[:60000])
        return
    warnings.filters[:] = filters
    gc.collect()
    gc.freeze()
    try:
        main.sendall(b"ready")
    except OSError:
        os._exit(0)  # the kernel ended while torch was being imported
    wake, waker = os.pipe()
    os.set_blocking(wake, False)
    os.set_blocking(waker, False)
    signal.set_wakeup_fd(waker)
    signal.signal(signal.SIGCHLD, lambda *_: None)
    crews: set[socket.socket] = set()
    children: dict[int, _Child] = {}
    while True:
        readable, _, _ = select.select([main, wake, *crews], [], [])
        if wake in readable:
            os.read(wake, 4096)
            _reap(children)
        for control in crews.intersection(readable):
            try:
                asked = control.recv(64)
            except OSError:  # closed with something unread in it
                asked = b""
            for pid in [pid for pid, child in children.items() if child.control is control]:
                _end(pid)  # not reaped yet, so the number is still this child's
            if not asked:
                crews.remove(control)
                control.close()
        if main in readable:
            message, fds, _, _ = socket.recv_fds(main, 4, 253)
            if not message:  # the kernel is gone
                for pid in children:
                    _end(pid)
                os._exit(0)
            control = socket.socket(fileno=fds[0])
            crews.add(control)
            try:
                _fork(fds[1:], control, [main.fileno(), wake, waker, *(c.fileno() for c in crews)], children)
            except OSError:  # no more processes or descriptors: that crew hears an end of file, the others go on
                for pid in [pid for pid, child in children.items() if child.control is control]:
                    _end(pid)
                crews.discard(control)
                control.close()


def _end(pid: int) -> None:
    """End a rank and all that it has started: each is a process group of its own."""
    with contextlib.suppress(ProcessLookupError, PermissionError):
        os.killpg(pid, signal.SIGKILL)


def _reap(children: dict[int, _Child]) -> None:
    while children:
        pid, status = os.waitpid(-1, os.WNOHANG)
        if pid == 0:
            return
        _end(pid)  # what it had started, and left running
        child = children.pop(pid)
        report = pickle.dumps((child.rank, status, child.notes()))
        child.close()
        try:
            child.control.sendall(len(report).to_bytes(4, "big") + report)
        except OSError:
            pass  # its world was closed: nobody asks any more


def _fork(fds: list[int], control: socket.socket, ours: list[int], children: dict[int, _Child]) -> None:
    conns, outputs = fds[0::2], fds[1::2]
    board = mmap.mmap(-1, BOARD_BYTES)  # takes no memory until somebody writes on it
    listener = socket.create_server(("127.0.0.1", 0), backlog=512)  # where this world's ranks will meet
    for rank, (conn, output) in enumerate(zip(conns, outputs)):
        child = _Child(control, rank)
        parent = os.getpid()
        pid = os.fork()
        if pid == 0:
            try:
                os.setpgid(0, 0)
                signal.set_wakeup_fd(-1)
                signal.signal(signal.SIGCHLD, signal.SIG_DFL)
                if sys.platform == "linux":
                    ctypes.CDLL(None).prctl(1, signal.SIGKILL)  # PR_SET_PDEATHSIG
                    if os.getppid() != parent:
                        os._exit(1)
                os.dup2(output, 1)
                os.dup2(output, 2)
                others = [c for c in conns if c != conn]
                for fd in (*ours, *others, *outputs, *(c.crash for c in children.values())):
                    os.close(fd)
                faulthandler.enable(child.crash)
                faulthandler.register(signal.SIGUSR1, child.crash, all_threads=False)
                importlib.import_module("course_utils.world.rank").main(
                    rank, len(conns), connection.Connection(conn), listener, child.place, board
                )
            except BaseException:
                os.write(2, traceback.format_exc().encode())
            finally:
                os._exit(70)  # never back into the nursery's loop
        with contextlib.suppress(OSError):  # whoever comes first, it or we
            os.setpgid(pid, pid)
        children[pid] = child
    board.close()
    listener.close()
    for fd in fds:
        os.close(fd)
