"""The views of a `Memory`: a plain-text table, an HTML table, a DataFrame. Nothing here computes."""

from __future__ import annotations

import html as _html
from collections.abc import Mapping
from fractions import Fraction
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    import pandas

    from course_utils.memory.value import Memory

_UNITS = (("TB", 12), ("GB", 9), ("MB", 6))  # powers of ten


def readable(value: int | float | Fraction, largest: int | float | Fraction | None = None) -> str:
    """Bytes for reading: exact below a million, in the unit that suits `largest` above.

    >>> readable(1776), readable(31.4e9), readable(140 * 10**9, largest=1120 * 10**9)
    ('1,776 B', '31.40 GB', '140.0 GB')
    """
    unit, power = _unit(value if largest is None else largest)
    if power == 0:
        return f"{value:,} B" if value == int(value) else f"{float(value):,.1f} B"
    scaled, top = float(value) / 10**power, float(value if largest is None else largest) / 10**power
    return f"{scaled:,.{1 if top >= 100 else 2}f} {unit}"


def _unit(value: int | float | Fraction) -> tuple[str, int]:
    for unit, power in _UNITS:
        if value >= (10**13 if unit == "TB" else 10**power):  # a thousand and some GB are still GB
            return unit, power
    return "B", 0


def _rows(memory: Memory) -> list[tuple[str, str]]:
    terms = {name: value for name, value in memory.terms().items() if value}
    return [(name, readable(value, memory.total)) for name, value in [*terms.items(), ("total", memory.total)]]


def _note(memory: Memory) -> str:
    unit, power = _unit(memory.total)
    return f"1 {unit} = 10^{power} B" if power else ""


def text(memory: Memory) -> str:
    """The plain-text table; terms of 0 bytes are left out."""
    rows = [("purpose", "bytes"), *_rows(memory)]
    left, right = (max(len(row[column]) for row in rows) for column in (0, 1))
    lines = [f"{name.ljust(left)}  {value.rjust(right)}" for name, value in rows]
    return "\n".join([*lines, *filter(None, [_note(memory)])])


def html(memory: Memory) -> str:
    """The HTML table."""
    head = "<tr><th style='text-align:left'>purpose</th><th style='text-align:right'>bytes</th></tr>"
    body = "".join(
        f"<tr><th scope='row' style='text-align:left;font-weight:normal'>{_html.escape(name)}</th>"
        f"<td style='text-align:right'>{value}</td></tr>"
        for name, value in _rows(memory)
    )
    note = f"<caption style='caption-side:bottom'>{_note(memory)}</caption>" if _note(memory) else ""
    return f"<table>{note}<thead>{head}</thead><tbody>{body}</tbody></table>"


def frame(memories: Mapping[str, Memory]) -> pandas.DataFrame:
    """One column per name, one row per term that any of them has, in bytes, and the total."""
    import pandas

    names = dict.fromkeys(name for memory in memories.values() for name in memory.terms())
    table = {column: {n: memory.terms().get(n, 0) for n in names} for column, memory in memories.items()}
    shown = [name for name in names if any(terms[name] for terms in table.values())]
    columns = {
        column: [_number(terms[name]) for name in shown] + [_number(memories[column].total)]
        for column, terms in table.items()
    }
    return pandas.DataFrame(columns, index=[*shown, "total"])


def _number(value: int | Fraction) -> int | float:
    return value if isinstance(value, int) else float(value)
