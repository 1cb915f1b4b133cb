"""The value `Report`: what a check found, and its views as text and as HTML. Nothing here computes."""

from __future__ import annotations

import html
import textwrap
from dataclasses import dataclass

_WIDTH = 110
_CELL = "text-align:left;vertical-align:top"
_BADGE = "padding:0 .5em;border-radius:.3em;color:#fff;white-space:nowrap;background:"
_GREEN, _RED = "#1a6b35", "#a8201a"  # as in the doctor's table


@dataclass(frozen=True)
class Row:
    """One thing that was looked at: whether it is right, and the words for each column of its report."""

    ok: bool
    cells: tuple[str, ...]


@dataclass(frozen=True, repr=False)
class Report:
    """The answer to one check.

    Attributes:
        passed: whether the function is right, and no dearer than it may be.
        headline: the answer in one sentence.
        columns, rows: what was looked at; empty if it never came to that.
        detail: longer text in fixed width, such as the report of ranks that failed; or "".
        hint: one sentence that helps on; "" if there is nothing to help with.
    """

    passed: bool
    headline: str
    columns: tuple[str, ...] = ()
    rows: tuple[Row, ...] = ()
    detail: str = ""
    hint: str = ""

    def __str__(self) -> str:
        return text(self)

    __repr__ = __str__

    def _repr_html_(self) -> str:
        return as_html(self)


def text(report: Report) -> str:
    """The report in plain text."""
    lines = [f"{'✓' if report.passed else '✗'} {report.headline}"]
    if report.rows:
        table = [("", *report.columns)] + [("ok" if row.ok else "!!", *row.cells) for row in report.rows]
        widths = [max(map(len, column)) for column in zip(*table, strict=True)]
        lines += ["  " + "  ".join(c.ljust(w) for c, w in zip(row, widths, strict=True)).rstrip() for row in table]
    if report.detail:
        lines += textwrap.indent(report.detail, "  ").splitlines()
    if report.hint:
        lines += textwrap.wrap(f"Hint: {report.hint}", _WIDTH, initial_indent="  ", subsequent_indent="        ")
    return "\n".join(lines)


def as_html(report: Report) -> str:
    """The report as HTML, readable on light and dark; every colour has a word beside it."""
    colour, verdict = (_GREEN, "✓ right") if report.passed else (_RED, "✗ not yet")
    badge = f'<span style="{_BADGE}{colour}">{verdict}</span>'
    parts = [f"<p>{badge} {html.escape(report.headline)}</p>"]
    if report.rows:
        head = "".join(f'<th scope="col" style="{_CELL}">{html.escape(c)}</th>' for c in ("", *report.columns))
        body = "".join(_html_row(row) for row in report.rows)
        parts.append(f"<table><thead><tr>{head}</tr></thead><tbody>{body}</tbody></table>")
    if report.detail:
        parts.append(f'<pre style="font-family:monospace">{html.escape(report.detail)}</pre>')
    if report.hint:
        parts.append(f"<p><b>Hint.</b> {html.escape(report.hint[0].upper() + report.hint[1:])}</p>")
    return f"<div>{''.join(parts)}</div>"


def _html_row(row: Row) -> str:
    state = f'<span style="{_BADGE}{_GREEN if row.ok else _RED}">{"✓ ok" if row.ok else "✗"}</span>'
    name, *rest = (html.escape(cell) for cell in row.cells)
    cells = "".join(f'<td style="{_CELL}">{cell}</td>' for cell in rest)
    return f'<tr><td style="{_CELL}">{state}</td><th scope="row" style="{_CELL}"><code>{name}</code></th>{cells}</tr>'
