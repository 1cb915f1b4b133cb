"""The value `Traffic`: rows of what was communicated, their sums, and the table that shows them."""

from __future__ import annotations

import html
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass

from .cost import Bytes, tidy


@dataclass(frozen=True)
class Line:
    """A line of the learner's code; its text is looked up when it is shown."""

    file: str
    number: int

    def __str__(self) -> str:
        from course_utils.world.frames import where

        return where({"file": self.file, "line": self.number})


@dataclass(frozen=True)
class Row:
    """One operation on one rank.

    Attributes:
        rank: the global rank that called it.
        operation: `all_reduce`, `reduce_scatter`, `all_gather`, `all_to_all`, `broadcast`, `reduce`, `gather`,
            `scatter`, `send`, `recv` or `barrier`, however the call was spelled.
        group: the global ranks of its group, in the group's order.
        peers: global ranks. Whom it sends to or receives from (`send`, `recv`), or the root (`broadcast`, `reduce`,
            `gather`, `scatter`); empty where everybody is everybody's peer, and for a `recv` from any source.
        bytes: what this rank sends by the definition of the operation (`course_utils.traffic.cost`); 0 for a `recv`.
        line: the innermost line of the learner's code that led to it; None where there is none.
        size: S of that definition, in bytes: of the message for `send` and `recv`.
        backward: True if it happened in a backward pass.

    Raises:
        TypeError: `bytes` is neither an int nor a Fraction, or `rank` is no int.
        ValueError: one of them is negative.
    """

    rank: int
    operation: str
    group: tuple[int, ...]
    peers: tuple[int, ...]
    bytes: Bytes
    line: Line | None = None
    size: int = 0
    backward: bool = False

    def __post_init__(self) -> None:
        for name, kind in (("rank", int), ("bytes", Bytes), ("size", int)):
            value = getattr(self, name)
            if isinstance(value, bool) or not isinstance(value, kind):
                raise TypeError(f"{name}={value!r}: a whole number was expected, not a {type(value).__name__}")
            if value < 0:
                raise ValueError(f"{name}={value}: it can't be negative")


@dataclass(frozen=True, repr=False)
class Traffic:
    """What was communicated, on one rank or, merged, on many. `str()` and a notebook show it as a table.

    >>> up = Row(0, "send", group=(0, 1), peers=(1,), bytes=12, size=12)
    >>> down = Row(1, "recv", group=(0, 1), peers=(0,), bytes=0, size=12)
    >>> traffic = Traffic((up, down))
    >>> len(traffic), traffic.total(), traffic.by_rank()
    (2, 12, {0: 12, 1: 0})
    >>> print(traffic)
    operation  group  calls per rank  bytes per rank  line
    send       0→1                 1            12 B
    recv       1←0                 1             0 B
    total                          1     0 B to 12 B
    """

    rows: Sequence[Row] = ()

    def __post_init__(self) -> None:
        for row in self.rows:
            if not isinstance(row, Row):
                raise TypeError(f"Traffic holds rows, and was given a {type(row).__name__}: {row!r}")

    def __len__(self) -> int:
        """Operations, each counted once on each rank that called it."""
        return len(self.rows)

    def __iter__(self) -> Iterator[Row]:
        return iter(self.rows)

    def only(self, keep: Callable[[Row], bool]) -> Traffic:
        """The rows for which `keep(row)` is true: `traffic.only(lambda row: row.backward)`."""
        if not callable(keep):
            raise TypeError(f"only({keep!r}): a function from a row to true or false was expected")
        return Traffic(tuple(row for row in self.rows if keep(row)))

    def total(self) -> Bytes:
        """Bytes sent, summed over all rows, and so over all ranks in them."""
        return tidy(sum(row.bytes for row in self.rows))

    def by_rank(self) -> dict[int, Bytes]:
        """Bytes that each rank sends."""
        return dict(sorted(_sums((row.rank, row.bytes) for row in self.rows).items()))

    def by_operation(self) -> dict[str, Bytes]:
        """Bytes sent in each operation, summed over all ranks, in the order of the first calls."""
        return _sums((row.operation, row.bytes) for row in self.rows)

    def calls(self) -> dict[str, int]:
        """How often each operation was called, summed over all ranks: one all-reduce of four ranks is four calls."""
        return _sums((row.operation, 1) for row in self.rows)

    def to_frame(self):
        """A pandas DataFrame with one line per row; bytes as floats, so that pandas can add them."""
        import pandas as pd

        columns = ("rank", "operation", "group", "peers", "bytes", "size", "backward", "line")
        frame = pd.DataFrame([[getattr(row, name) for name in columns] for row in self.rows], columns=columns)
        frame["line"] = [str(row.line or "") for row in self.rows]
        return frame.astype({"bytes": float})

    def __str__(self) -> str:
        if not self.rows:
            return "no communication was counted"
        head, *body = table = self._table()
        widths = [max(len(line[i]) for line in table) for i in range(len(head))]
        pads = [str.rjust if name.endswith("per rank") else str.ljust for name in head]
        form = list(zip(pads, widths, strict=True))
        lines = ["  ".join(pad(cell, w) for cell, (pad, w) in zip(line, form, strict=True)).rstrip() for line in table]
        return "\n".join([*lines, *_note(body)])

    __repr__ = __str__

    def _repr_html_(self) -> str:
        if not self.rows:
            return f"<p>{self}</p>"
        head, *body = self._table()
        rows = ["".join(f"<th>{html.escape(cell)}</th>" for cell in head)]
        rows += ["".join(f"<td>{html.escape(cell)}</td>" for cell in line) for line in body]
        table = "".join(f"<tr>{row}</tr>" for row in rows)
        return f"<table>{table}</table>" + "".join(f"<p>{note}</p>" for note in _note(body))

    def _table(self) -> list[list[str]]:
        """The header and the lines of the table: rows that differ only in their rank, peer or size share a line."""
        shared: dict[tuple, list[Row]] = {}
        for row in self.rows:
            root = () if row.operation in _PAIRS else row.peers
            shared.setdefault((row.operation, row.group, root, row.line, row.backward), []).append(row)
        table = [["operation", "group", "calls per rank", "bytes per rank", "in backward", "line"]]
        for (operation, _, _, line, backward), rows in shared.items():
            table.append([operation, _who(rows), *_per_rank(rows), "yes" if backward else "", str(line or "")])
        table.append(["total", "", *_per_rank(self.rows), "", ""])
        if not any(row.backward for row in self.rows):
            table = [[*line[:4], line[5]] for line in table]
        return table


def merge(parts: Iterable[Traffic]) -> Traffic:
    """One `Traffic` of many: of all ranks, as in `merge(launch(step))`, or of several steps.

    Raises:
        TypeError: one of the parts is no `Traffic`.
    """
    parts = list(parts)
    for i, part in enumerate(parts):
        if not isinstance(part, Traffic):
            kind = "None" if part is None else f"a {type(part).__name__}"
            raise TypeError(
                f"merge() needs the Traffic of each rank, and item {i} is {kind}: "
                "end the function that you launch with `return traffic`"
            )
    return Traffic(tuple(row for part in parts for row in part.rows))


_PAIRS = {"send": "→", "recv": "←"}
_UNITS = {"TB": 12, "GB": 9, "MB": 6}  # powers of ten


def _sums(pairs: Iterable[tuple]) -> dict:
    sums: dict = {}
    for key, value in pairs:
        sums[key] = tidy(sums.get(key, 0) + value)
    return sums


def _note(body: list[list[str]]) -> list[str]:
    used = [f"1 {unit} = 10^{power} B" for unit, power in _UNITS.items() if any(unit in line[3] for line in body)]
    return [", ".join(used)] if used else []


def _who(rows: list[Row]) -> str:
    operation, group, root = rows[0].operation, rows[0].group, rows[0].peers
    if operation in _PAIRS:
        arrow = _PAIRS[operation]
        pairs = dict.fromkeys((row.rank, *(row.peers or "?")) for row in rows)
        shown = [f"{rank}{arrow}{peer}" for rank, peer in pairs]
        return " ".join(shown if len(shown) <= 8 else [*shown[:7], "…"])
    return _ranges(group) + (f", root {root[0]}" if root else "")


def _ranges(ranks: Sequence[int]) -> str:
    """`0-3`, `0, 2`, `0-1, 4-5`"""
    runs: list[list[int]] = []
    for rank in ranks:
        if runs and rank == runs[-1][-1] + 1:
            runs[-1].append(rank)
        else:
            runs.append([rank])
    return ", ".join(f"{run[0]}-{run[-1]}" if len(run) > 1 else f"{run[0]}" for run in runs)


def _per_rank(rows: Sequence[Row]) -> tuple[str, str]:
    """Calls and bytes of each rank that has some of these rows: one number where they agree, the range where not."""
    calls = _sums((row.rank, 1) for row in rows).values()
    sent = _sums((row.rank, row.bytes) for row in rows).values()
    return _range(min(calls), max(calls), str), _range(min(sent), max(sent), _readable)


def _range(low: Bytes, high: Bytes, show: Callable[[Bytes], str]) -> str:
    return show(high) if low == high else f"{show(low)} to {show(high)}"


def _readable(value: Bytes) -> str:
    """Exact below a million, four digits above."""
    for unit, power in _UNITS.items():
        if value >= 10**power:
            return f"{float(value) / 10**power:.4g} {unit}"
    return f"{value:,} B" if isinstance(value, int) else f"{float(value):,.1f} B"
