"""What travels between the kernel and its ranks: functions of notebook cells, arguments, results.

cloudpickle sends functions by value. Three things are done differently here: the code of a cell keeps its file name, so
that tracebacks and `inspect` find the source; functions of the notebook share one namespace on the rank, its
`__main__`, so that a `global` that one call sets is there in the next; and tensors travel as plain CPU values, never as
shared memory or whole storages.
"""

from __future__ import annotations

import builtins
import hashlib
import importlib
import io
import linecache
import pickle
import sys
import types

import cloudpickle

_NAMESPACES: dict[tuple, dict] = {}  # on a rank: the globals of the notebook's functions, by where they were defined


def _namespace(module: str, origin: int) -> dict:
    if origin == 0:  # the notebook's own: the rank's `__main__`, as it would be a script's
        return sys.modules["__main__"].__dict__
    return _NAMESPACES.setdefault((module, origin), {"__name__": module, "__builtins__": builtins})


class _Namespace:
    """Stands for a function's globals: on a rank, the one namespace of all functions that share them here."""

    def __init__(self, namespace: dict, main: dict | None):
        self.module = namespace.get("__name__", "__main__")
        self.origin = 0 if namespace is main else id(namespace)

    def __reduce__(self):
        return _namespace, (self.module, self.origin)


class Unsendable(TypeError):
    """A value that can't leave the process it lives in."""


class _Pickler(cloudpickle.Pickler):
    def __init__(self, file, sent: dict | None, main: dict | None):
        super().__init__(file, protocol=5)
        self.sent, self.main = sent, main
        self.code_files: set[str] = set()

    def reducer_override(self, obj):
        if isinstance(obj, types.CodeType):
            self.code_files.add(obj.co_filename)
            build, args, *rest = cloudpickle.cloudpickle._code_reduce(obj)
            args = tuple(obj.co_filename if a == "<dynamic-code>" else a for a in args)
            return build, args, *rest
        if isinstance(obj, types.ModuleType) and sys.modules.get(obj.__name__) is obj:
            return importlib.import_module, (obj.__name__,)  # cloudpickle would try `torch.ops` by value
        torch = sys.modules.get("torch")
        if torch is not None and isinstance(obj, torch.Tensor):
            return _reduce_tensor(torch, obj)
        return super().reducer_override(obj)

    def _function_getnewargs(self, func):
        code, base, *rest = super()._function_getnewargs(func)
        if self.sent is not None:
            base = _Namespace(func.__globals__, self.main)
        return code, base, *rest

    def _dynamic_function_reduce(self, func):
        make, arguments, (state, slots), *rest = super()._dynamic_function_reduce(func)
        if self.sent is not None:
            needed = slots["__globals__"]
            slots["__globals__"] = {n: v for n, v in needed.items() if self._is_news(id(func.__globals__), n, v)}
        return make, arguments, (state, slots), *rest

    def _is_news(self, origin: int, name: str, value) -> bool:
        """Whether a global has changed here since it was last sent: what a rank has made of it meanwhile stays."""
        if isinstance(value, (types.FunctionType, types.ModuleType, type)):
            return True  # code: it costs little, and is never what a rank keeps a result in
        now = hashlib.sha256(dumps(value)[0]).digest()
        before, self.sent[origin, name] = self.sent.get((origin, name)), now
        return before != now


def _reduce_tensor(torch, t):
    distributed = sys.modules.get("torch.distributed.tensor")
    if distributed is not None and isinstance(t, distributed.DTensor):
        raise Unsendable(
            "a DTensor can't leave its rank: return x.to_local() (this rank's shard) or x.full_tensor() (the whole)"
        )
    if (
        t.layout is not torch.strided
        or t.is_quantized
        or t.is_meta
        or type(t) not in (torch.Tensor, torch.nn.Parameter)
    ):
        return NotImplemented
    flat = t.detach().cpu().resolve_conj().resolve_neg().contiguous().reshape(-1)
    data = flat.view(torch.uint8).numpy().tobytes() if flat.numel() else b""
    is_parameter = isinstance(t, torch.nn.Parameter)
    return _rebuild_tensor, (data, str(t.dtype), tuple(t.shape), t.is_leaf and t.requires_grad, is_parameter)


def _rebuild_tensor(data, dtype, shape, requires_grad, is_parameter):
    import torch

    dtype = getattr(torch, dtype.removeprefix("torch."))
    # on the CPU also where a rank's default device is a GPU: a value means the same wherever it is read
    if data:
        t = torch.frombuffer(bytearray(data), dtype=dtype).reshape(shape)
    else:
        t = torch.empty(shape, dtype=dtype, device="cpu")
    if is_parameter:
        return torch.nn.Parameter(t, requires_grad=requires_grad)
    return t.requires_grad_(requires_grad)


def dumps(value, sent: dict | None = None, main: dict | None = None) -> tuple[bytes, dict]:
    """The value as bytes, and the `linecache` entries of the cells whose code went along.

    With `sent`, functions find on the other side the globals that earlier ones left there; the dictionary notes what
    the other side has been sent. `main` are the globals that become the other side's `__main__`.

    Raises `Unsendable` with the reason in one sentence.
    """
    file = io.BytesIO()
    pickler = _Pickler(file, sent, main)
    try:
        pickler.dump(value)
    except Unsendable:
        raise
    except Exception as error:  # pickling runs code of the learner: anything can come out of it
        raise Unsendable(f"{_first_line(error)}") from error
    sources = {f: linecache.cache[f] for f in pickler.code_files if _is_cell(linecache.cache.get(f))}
    return file.getvalue(), sources


def _is_cell(entry) -> bool:
    return entry is not None and len(entry) == 4 and entry[1] is None  # no modification time: not a file


def loads(data: bytes):
    return pickle.loads(data)


def _first_line(error: BaseException) -> str:
    lines = str(error).strip().splitlines()
    return f"{type(error).__name__}: {lines[0]}" if lines else type(error).__name__
