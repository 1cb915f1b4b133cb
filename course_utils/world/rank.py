"""What runs in a rank: join the world, do what the kernel asks, say where one is when asked.

The main thread runs the learner's functions, as a script's main thread would. A second thread listens to the kernel, so
that a rank which waits in a collective can still be asked where it is.
"""

from __future__ import annotations

import contextlib
import datetime
import linecache
import multiprocessing
import os
import pickle
import queue
import random
import signal
import sys
import threading
import time
import types

import torch
import torch.distributed as dist

from . import messages, wire
from .frames import is_mine, mine

FOREVER = datetime.timedelta(days=1)  # the kernel keeps the deadlines: at its own timeout, a group would hide who waits

for _new, _old in {
    "all_gather_single": "all_gather_into_tensor",
    "reduce_scatter_single": "reduce_scatter_tensor",
}.items():
    if not hasattr(dist, _new):  # torch before 2.13
        setattr(dist, _new, getattr(dist, _old))


_exit = os._exit


class Rank:
    def __init__(self, rank, size, conn, place, board, flush):
        self.rank, self.size, self.conn, self.place, self.board, self.flush = rank, size, conn, place, board, flush
        self.jobs: queue.SimpleQueue = queue.SimpleQueue()
        self.sending = threading.Lock()
        self.main_thread = threading.get_ident()
        self.before: dict[str, int] = {}  # group -> how many collectives it had called before this run
        self.after: dict[str, int] = {}  # the same at the end of it
        self.running = False

    def send(self, kind: str, **content) -> None:
        message = pickle.dumps((kind, content), protocol=5)
        with self.sending:
            self.conn.send_bytes(message)

    def listen(self) -> None:
        """The second thread: what the kernel says; between two messages, note down where the main thread is."""
        while True:
            try:
                if self.running and not self.conn.poll(0.1):
                    self.note_place()
                    continue
                kind, content = pickle.loads(self.conn.recv_bytes())
                self.running = self.running or kind == "run"
            except (EOFError, OSError):
                _end_children()
                _exit(0)
            if kind == "where":
                try:
                    self.send("where", **self.where(content["frames"]))
                except Exception:  # the main thread went on changing what is being looked at: an empty answer
                    self.send("where", stack=[], waits=None, records=[], messages=[])
            else:
                self.jobs.put((kind, content))

    def where(self, frames: bool) -> dict:
        """What this rank is doing now, and the collectives it has called in this run."""
        stack = sys._current_frames().get(self.main_thread)
        return {"stack": summarize(stack), "waits": waiting_in(stack), **self.calls(frames)}

    def calls(self, frames: bool = False) -> dict:
        """What this rank has called in this run: collectives, and messages between two ranks."""
        records = flight_records(frames)
        self.after.update({record["group"][0]: record["number"] for record in records})
        for record in records:
            record["number"] -= self.before.get(record["group"][0], 0)
        return {"records": [r for r in records if r["number"] > 0], "messages": list(messages.NOTES)}

    def note_place(self) -> None:
        data = pickle.dumps(mine(summarize(sys._current_frames().get(self.main_thread)))[-1:])
        if self.place is not None and len(data) <= 4092:
            self.place[: 4 + len(data)] = len(data).to_bytes(4, "big") + data

    def exit(self, status: int) -> None:
        """`os._exit`, which leaves no trace by itself."""
        self.note_place()
        self.flush_output()
        _exit(status)

    # ------------------------------------------------------------ the main thread

    def join(self, listener, settings) -> None:
        """The default process group, as `torchrun` and `init_process_group` would have made it."""
        device, available = settings["device"], torch.cuda.device_count()
        if device == "cuda" and available < self.size:
            raise ValueError(
                f"device='cuda' with world_size={self.size} needs {self.size} GPUs, one for each rank, and this "
                f"machine has {available}: use device='auto' (GPUs if there are enough, otherwise CPUs), or a "
                "smaller world_size"
            )
        port = listener if isinstance(listener, int) else listener.getsockname()[1]
        os.environ.update(RANK=str(self.rank), LOCAL_RANK=str(self.rank), WORLD_SIZE=str(self.size))
        os.environ.update(LOCAL_WORLD_SIZE=str(self.size), MASTER_ADDR="127.0.0.1", MASTER_PORT=str(port))
        change_environment(settings["environment"])
        dist.set_debug_level_from_env()  # TORCH_DISTRIBUTED_DEBUG of a cell comes after torch was imported here
        if self.rank == 0:
            place = dict(is_master=True, master_listen_fd=listener.detach())
        else:
            place = dict(is_master=False)
            if not isinstance(listener, int):
                listener.close()
        if sys.platform == "win32":
            place["use_libuv"] = False  # torch's wheels for Windows are built without it
        store = dist.TCPStore("127.0.0.1", port, self.size, wait_for_workers=False, timeout=FOREVER, **place)
        links = settings["links"] and wire.loads(settings["links"])  # emulated ones: see course_utils.links
        on_gpu = device == "cuda" or (device == "auto" and available >= self.size and not links)
        if on_gpu:
            torch.cuda.set_device(self.rank)
            torch.set_default_device(f"cuda:{self.rank}")
        backend = "nccl" if on_gpu else links.backend(self.board) if links else "gloo"
        dist.init_process_group(backend, store=store, rank=self.rank, world_size=self.size, timeout=FOREVER)
        seed_everything(settings["seed"])

    def run(self, content) -> None:
        self.before = dict(self.after)
        try:
            os.chdir(content["cwd"])
        except OSError:
            pass
        sys.path[:] = content["path"]
        change_environment(content["environment"])
        linecache.cache.update(content["sources"])
        messages.NOTES.clear()
        try:
            try:
                fn, args, kwargs = wire.loads(content["job"])
            except BaseException as error:
                error.add_note("(this rank could not unpack the function or an argument that the notebook sent)")
                raise
            value = fn(*args, **kwargs)
            if isinstance(value, types.CoroutineType):
                value.close()
                raise TypeError("an async function can't run on a rank: use a plain function")
        except BaseException as error:
            self.flush_output()
            self.send("raised", time=time.monotonic(), **describe_error(error), **self.calls())
            return
        finally:
            self.running = False
        try:
            payload, _ = wire.dumps(value)
        except wire.Unsendable as error:
            text = f"it returned a {type(value).__qualname__}, which can't be sent back to the notebook: {error}"
            self.flush_output()
            self.send("raised", time=time.monotonic(), type="", text=text, stack_of_error=[])
            return
        self.flush_output()
        self.send("done", value=payload, **self.calls())

    def flush_output(self) -> None:
        for stream in (sys.stdout, sys.stderr):
            with contextlib.suppress(Exception):
                stream.flush()
        if self.flush is not None:
            self.flush()


def main(rank: int, size: int, conn, listener, place, board, flush=None) -> None:
    """A rank's whole life.

    `place` and `board` are memory: the first shared with whoever will report this rank's end, the second with all ranks
    of this world.
    """
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # the kernel's interrupt is for the kernel: it ends the ranks
    if "fork" in multiprocessing.get_all_start_methods():
        multiprocessing.set_start_method("fork", force=True)  # a DataLoader's workers can have a data set of a cell
    sys.stdout = open(1, "w", buffering=1, encoding="utf-8", errors="backslashreplace", closefd=False)
    sys.stderr = open(2, "w", buffering=1, encoding="utf-8", errors="backslashreplace", closefd=False)
    sys.modules["__main__"] = types.ModuleType("__main__")
    torch.set_num_threads(1)
    messages.watch(before_leaving=_groups)
    self = Rank(rank, size, conn, place, board, flush)
    threading.Thread(target=self.listen, daemon=True).start()
    os._exit = self.exit
    kind, settings = self.jobs.get()
    if kind == "join":
        try:
            self.join(listener, settings)
        except BaseException as error:
            self.send("refused", **describe_error(error))
            kind, _ = self.jobs.get()
        else:
            self.send("joined", backend=dist.get_backend())
            while (job := self.jobs.get())[0] == "run":
                self.run(job[1])
    leave()
    self.flush_output()
    _end_children()
    _exit(0)


def leave() -> None:
    """End the group first: a process that ends with a group alive aborts now and then."""
    if dist.is_initialized():
        with contextlib.suppress(Exception):
            dist.destroy_process_group()


def _end_children() -> None:
    with contextlib.suppress(Exception):
        multiprocessing.util._exit_function()


def seed_everything(seed: int) -> None:
    """The same seed on every rank, as every training script does before it builds its model."""
    torch.manual_seed(seed)
    random.seed(seed)
    if "numpy" in sys.modules:
        sys.modules["numpy"].random.seed(seed % 2**32)


def change_environment(changes: dict[str, str | None]) -> None:
    for name, value in changes.items():
        if value is None:
            os.environ.pop(name, None)
        else:
            os.environ[name] = value


# ---------------------------------------------------------------- saying where one is


def summarize(frame) -> list[dict]:
    """A stack, outermost first, as plain values."""
    stack = []
    while frame is not None:
        stack.append(_place(frame.f_code, frame.f_lineno))
        frame = frame.f_back
    return stack[::-1]


def _place(code, line) -> dict:
    return {"file": code.co_filename, "line": line, "name": code.co_name}


_COLLECTIVES = os.path.join("torch", "distributed", "")
_SHOWN = (
    "tensor",
    "tensor_list",
    "input",
    "input_tensor",
    "input_list",
    "output",
    "output_tensor",
    "gather_list",
    "obj",
)


def waiting_in(frame) -> dict | None:
    """The call into `torch.distributed` that this stack is in: its name, its tensor, its peer.

    Read from the frames of torch's own functions, which see `send` and `recv` too; None if it is elsewhere.
    """
    outermost = None
    while frame is not None and not is_mine(frame.f_code.co_filename):
        name = frame.f_code.co_name
        if _COLLECTIVES in frame.f_code.co_filename and not name.startswith("_") and name != "wrapper":
            outermost = frame
        frame = frame.f_back
    if outermost is None or outermost.f_code.co_name.startswith(("get_", "is_")):  # a question, that waits for nobody
        return None
    values = outermost.f_locals
    tensor = next((t for k in _SHOWN if (t := _first_tensor(values.get(k))) is not None), None)
    peer = next(
        (f"{k}={values[k]}" for k in ("src", "dst", "group_src", "group_dst") if isinstance(values.get(k), int)), ""
    )
    return {"name": outermost.f_code.co_name, "tensor": tensor, "peer": peer}


def _first_tensor(value) -> str | None:
    if isinstance(value, torch.Tensor):
        return f"{str(value.dtype).removeprefix('torch.')}{list(value.shape)}"
    if isinstance(value, (list, tuple)) and value and isinstance(value[0], torch.Tensor):
        return _first_tensor(value[0])
    return None


def _words(value) -> str:
    try:
        return str(value)
    except Exception as failure:  # the learner's own __str__
        return f"(its text can't be had: {type(failure).__name__})"


def describe_error(error: BaseException) -> dict:
    """An error as plain values: the kernel has the sources of the cells and writes the report."""
    stack, trace, innermost = [], error.__traceback__, None
    while trace is not None:
        innermost = trace.tb_frame
        stack.append(_place(innermost.f_code, trace.tb_lineno))
        trace = trace.tb_next
    kind = type(error)
    text = "" if kind.__str__ is BaseException.__str__ and not error.args else _words(error)
    cause = error.__cause__ or (None if error.__suppress_context__ else error.__context__)
    return {
        "type": kind.__qualname__
        if kind.__module__ in ("builtins", "__main__")
        else f"{kind.__module__}.{kind.__qualname__}",
        "text": "\n".join([text, *map(_words, getattr(error, "__notes__", []))]).strip(),
        "stack_of_error": stack,
        "waits": waiting_in(innermost),
        "cause": None if cause is None else f"{type(cause).__qualname__}: {_words(cause)}",
    }


# ---------------------------------------------------------------- torch's flight recorder

_DTYPES = {"Float": "float32", "Double": "float64", "Half": "float16", "BFloat16": "bfloat16", "Long": "int64"}
_DTYPES |= {"Int": "int32", "Short": "int16", "Char": "int8", "Byte": "uint8", "Bool": "bool"}
_DTYPES |= {"ComplexFloat": "complex64", "ComplexDouble": "complex128"}


def flight_records(frames: bool = False) -> list[dict]:
    """The last collectives that this rank has called: what, with what, in which group, as its how-manieth.

    On Gloo, `send` and `recv` leave no record.
    """
    try:
        entries = pickle.loads(torch._C._distributed_c10d._dump_fr_trace(True, frames, False))["entries"]
    except (AttributeError, RuntimeError):  # a torch without it
        return []
    groups = _groups()
    return [_record(e, groups) for e in entries if not e["is_p2p"]]


def _groups() -> dict[str, tuple[int, ...]]:
    """The members of every group that this rank has been in, by the group's name: also of those it has left."""
    world = dist.distributed_c10d._world
    names = dict(world.pg_names)
    _KNOWN.update({names[pg]: tuple(sorted(m)) for pg, m in list(world.pg_group_ranks.items()) if pg in names})
    return _KNOWN


_KNOWN: dict[str, tuple[int, ...]] = {}


def _record(entry, groups) -> dict:
    name = entry["process_group"][0]
    places = [f for f in entry.get("frames", ()) if is_mine(f["filename"])]  # innermost first
    return {
        "group": (name, groups.get(name)),
        "number": entry["collective_seq_id"],
        "operation": entry["profiling_name"].split(":")[-1].lstrip("_"),
        "inputs": [(_DTYPES.get(d, d), s) for d, s in zip(entry["input_dtypes"], entry["input_sizes"])],
        "outputs": [(_DTYPES.get(d, d), s) for d, s in zip(entry["output_dtypes"], entry["output_sizes"])],
        "place": dict(file=places[0]["filename"], line=places[0]["line"], name=places[0]["name"]) if places else None,
    }
