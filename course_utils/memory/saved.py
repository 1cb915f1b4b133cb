"""The value `Saved`: which tensors autograd keeps for a backward pass. The live half produces it."""

from __future__ import annotations

import html
from collections.abc import Iterator
from dataclasses import dataclass
from typing import TYPE_CHECKING

from course_utils.traffic.value import Line

from .value import Memory

if TYPE_CHECKING:
    import pandas


@dataclass(frozen=True)
class SavedTensor:
    """One storage that autograd keeps.

    Attributes:
        shape, dtype: of the first tensor that was saved of it.
        bytes: of the whole storage, which stays as long as one view of it does.
        line: the innermost line of code outside torch that saved it; None where there is none.

    >>> SavedTensor((2, 3), "bfloat16", 12).bytes
    12
    """

    shape: tuple[int, ...]
    dtype: str
    bytes: int
    line: Line | None = None


@dataclass(frozen=True, repr=False)
class Saved:
    """What autograd keeps, each storage once, in the order in which it was saved; parameters are left out.

    >>> saved = Saved((SavedTensor((2, 3), "float32", 24), SavedTensor((4,), "float32", 16)))
    >>> saved.bytes, len(saved)
    (40, 2)
    >>> print(saved)
    bytes  shape   dtype    line
       24  (2, 3)  float32
       16  (4,)    float32
       40          total
    """

    tensors: tuple[SavedTensor, ...] = ()

    @property
    def bytes(self) -> int:
        """All of them.

        >>> Saved().bytes
        0
        """
        return sum(tensor.bytes for tensor in self.tensors)

    @property
    def memory(self) -> Memory:
        """The same as a `Memory` of activations.

        >>> Saved((SavedTensor((4,), "float32", 16),)).memory.activations
        16
        """
        return Memory(activations=self.bytes)

    def by_line(self) -> dict[str, int]:
        """Bytes by the line of code that saved them.

        >>> Saved((SavedTensor((4,), "float32", 16, Line("layer.py", 3)),)).by_line()
        {'line 3 of the cell': 16}
        """
        found: dict[str, int] = {}
        for tensor in self.tensors:
            line = str(tensor.line or "")
            found[line] = found.get(line, 0) + tensor.bytes
        return found

    def to_frame(self) -> pandas.DataFrame:
        """A table with one row per storage (needs pandas).

        >>> Saved((SavedTensor((4,), "float32", 16),)).to_frame()["bytes"].tolist()
        [16]
        """
        import pandas

        rows = [[tensor.bytes, tensor.shape, tensor.dtype, str(tensor.line or "")] for tensor in self.tensors]
        return pandas.DataFrame(rows, columns=["bytes", "shape", "dtype", "line"])

    def __len__(self) -> int:
        return len(self.tensors)

    def __iter__(self) -> Iterator[SavedTensor]:
        return iter(self.tensors)

    def _table(self) -> list[tuple[str, ...]]:
        rows = [
            (f"{tensor.bytes:,}", str(tensor.shape), tensor.dtype, str(tensor.line or "")) for tensor in self.tensors
        ]
        return [("bytes", "shape", "dtype", "line"), *rows, (f"{self.bytes:,}", "", "total", "")]

    def __str__(self) -> str:
        table = self._table()
        widths = [max(len(row[column]) for row in table) for column in range(4)]
        pads = (str.rjust, str.ljust, str.ljust, str.ljust)
        return "\n".join(
            "  ".join(pad(cell, width) for cell, pad, width in zip(row, pads, widths)).rstrip() for row in table
        )

    __repr__ = __str__

    def _repr_html_(self) -> str:
        head, *body = self._table()
        rows = ["".join(f"<th>{cell}</th>" for cell in head)]
        rows += ["".join(f"<td>{html.escape(cell)}</td>" for cell in row) for row in body]
        return f"<table>{''.join(f'<tr>{row}</tr>' for row in rows)}</table>"
