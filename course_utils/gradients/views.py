"""The views of a `Diagnosis`: words, a plain-text table, an HTML table, a DataFrame. Nothing here computes.

Text and HTML are the same on every machine: errors of healthy gradients, which are rounding and differ between CPUs,
are shown as "≈ 0", all others with two significant digits.
"""

from __future__ import annotations

import html as _html
import textwrap
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    import pandas

    from course_utils.gradients.values import Diagnosis, Verdict

_WIDTH = 120
_BADGE = "padding:0 .5em;border-radius:.3em;color:#fff;white-space:nowrap;background:"
_CELL = "text-align:left;vertical-align:top"
_GREEN, _RED = "#1a6b35", "#a8201a"  # white on either has a contrast above 6, on a light or a dark page


def number(value: float | None, digits: int = 4) -> str:
    """A factor for reading: `2`, `0.25`, `1.0003`; never "1" for something that is not 1.

    >>> number(0.25), number(1.00002), number(None)
    ('0.25', '1.00002', '')
    """
    if value is None:
        return ""
    short = f"{value:.{digits}g}"
    return f"{value:.7g}" if short == "1" != f"{value:.7g}" else short


def words(verdict: Verdict) -> str:
    """The diseases with dimension and factor, joined by "+"."""
    parts = []
    for disease in verdict.diseases:
        part = disease.value
        if disease == "scaled":
            value = number(verdict.k)
            part += f" by {verdict.k_name} ({value})" if verdict.k_name else f" by {value}"
            if verdict.dim is not None and len(verdict.diseases) == 1:
                part += f", shards of dim {verdict.dim}"
        elif verdict.dim is not None and disease in ("right shard", "own slice only", "wrong shard"):
            part += f", dim {verdict.dim}"
        parts.append(part)
    return " + ".join(parts)


def ranks(verdict: Verdict) -> str:
    """The affected ranks: "all", "0, 3", or "–"."""
    if not verdict.ranks:
        return "–"
    everyone = len(verdict.ranks) == len(verdict.errors)
    return "all" if everyone else ", ".join(map(str, verdict.ranks))


def error(verdict: Verdict) -> str:
    """The largest absolute error, rounded so that it is the same on every machine."""
    if verdict.error is None:
        return "–"
    return "≈ 0" if verdict.healthy else f"{verdict.error:.2g}"


def sentence(verdict: Verdict) -> str:
    """One verdict in one line."""
    text = f"{verdict.name}: {words(verdict)}"
    if not verdict.healthy:
        text += f" (ranks: {ranks(verdict)}; largest error {error(verdict)})"
    text += f" [{verdict.note}]" if verdict.note else ""
    return text + (f". Cure: {verdict.cure}." if verdict.cure else "")


def headline(diagnosis: Diagnosis) -> str:
    """The result in one sentence."""
    total, sick, size = len(diagnosis), len(diagnosis.sick), diagnosis.world_size
    on = f"on {size} rank{'s' * (size != 1)}"
    if not sick:
        gradients = "the gradient is right" if total == 1 else f"all {total} gradients are right"
        return (
            f"Healthy: {gradients} {on}" if diagnosis.healthy else f"Not healthy: {gradients}, the output is not, {on}"
        )
    return f"Not healthy: {sick} of {total} gradient{'s' * (total != 1)} {'is' if sick == 1 else 'are'} not right {on}"


def _rows(diagnosis: Diagnosis) -> list[tuple[str, Verdict]]:
    forward = [("forward", diagnosis.forward)] if diagnosis.forward is not None else []
    return forward + [(verdict.name, verdict) for verdict in diagnosis]


def text(diagnosis: Diagnosis) -> str:
    """The plain-text table; notes and cures stand below their row."""
    rows = _rows(diagnosis)
    cells = [("", "gradient", "verdict", "wrong on", "error")]
    cells += [("ok" if v.healthy else "!!", name, words(v), ranks(v), error(v)) for name, v in rows]
    widths = [max(len(row[column]) for row in cells) for column in range(5)]
    lines = ["  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)).rstrip() for row in cells]
    table = [headline(diagnosis), lines[0]]
    for line, (_, verdict) in zip(lines[1:], rows, strict=True):
        table.append(line)
        for label, extra in (("note", verdict.note), ("cure", verdict.cure)):
            if extra:
                indent = " " * 6
                table += textwrap.wrap(
                    f"{label}: {extra}",
                    _WIDTH,
                    initial_indent=indent,
                    subsequent_indent=indent,
                    break_on_hyphens=False,
                )
    return "\n".join(table)


def html(diagnosis: Diagnosis) -> str:
    """The HTML table: every state is a symbol, a word and a colour; names are escaped; readable on light and dark."""

    def escape(value: str) -> str:
        return _html.escape(value, quote=True)

    def badge(healthy: bool) -> str:
        symbol = "✓ ok" if healthy else "✗ sick"
        return f'<span style="{_BADGE}{_GREEN if healthy else _RED}">{symbol}</span>'

    columns = ("state", "gradient", "verdict", "wrong on ranks", "largest error", "cure")
    head = "".join(f'<th scope="col" style="{_CELL}">{column}</th>' for column in columns)
    body = []
    for name, verdict in _rows(diagnosis):
        said = escape(words(verdict)) + (f"<br><small>{escape(verdict.note)}</small>" if verdict.note else "")
        rest = [said, escape(ranks(verdict)), escape(error(verdict)), escape(verdict.cure)]
        body.append(
            f'<tr><td style="{_CELL}">{badge(verdict.healthy)}</td>'
            f'<th scope="row" style="{_CELL}"><code>{escape(name)}</code></th>'
            + "".join(f'<td style="{_CELL}">{cell}</td>' for cell in rest)
            + "</tr>"
        )
    caption = f'<caption style="text-align:left">{badge(diagnosis.healthy)} {escape(headline(diagnosis))}</caption>'
    return f"<table>{caption}<thead><tr>{head}</tr></thead><tbody>{''.join(body)}</tbody></table>"


def frame(diagnosis: Diagnosis) -> pandas.DataFrame:
    """The rows as a DataFrame."""
    import pandas

    return pandas.DataFrame(
        [
            {
                "gradient": name,
                "healthy": verdict.healthy,
                "verdict": words(verdict),
                "k": verdict.k,
                "dim": verdict.dim,
                "ranks": ranks(verdict),
                "error": verdict.error,
                "cure": verdict.cure,
            }
            for name, verdict in _rows(diagnosis)
        ]
    ).set_index("gradient")
