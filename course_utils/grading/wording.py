"""What reports share: words for numbers of things, tables, and whole reports on what many exercises meet.

Words are `enumerated`, `times`, `ranks` and `operations`; `within` puts a place before a headline. Tables are
`verdict_table` of a diagnosis and `traffic_table` of what was counted. Reports are `failed`, on ranks that raised or
hang; `unseen`, on right gradients for which too little was counted; and `resized`, on a model that has other parameters
than before.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import replace

from course_utils.gradients import Diagnosis
from course_utils.grading.reports import Report, Row
from course_utils.traffic import Traffic
from course_utils.world import RankError, RankTimeout

Table = tuple[tuple[str, ...], tuple[Row, ...]]


def enumerated(things: Iterable) -> str:
    """
    >>> enumerated([2, 3, 4]), enumerated([2])
    ('2, 3 and 4', '2')
    """
    *most, last = map(str, things)
    return f"{', '.join(most)} and {last}" if most else last


def times(number: int, what: str) -> str:
    """
    >>> times(1, "bucket"), times(3, "bucket")
    ('1 bucket', '3 buckets')
    """
    return f"{number} {what}{'' if number == 1 else 's'}"


def ranks(*numbers: int) -> str:
    """
    >>> ranks(2, 3, 4), ranks(1)
    ('2, 3 and 4 ranks', '1 rank')
    """
    return f"{enumerated(numbers)} {'rank' if numbers == (1,) else 'ranks'}"


def within(where: str, report: Report, after: str = "") -> Report:
    """The same report, its headline told where it happened, and `after` at its end."""
    return replace(report, headline=f"{where}: {report.headline}{after}")


def verdict_table(diagnosis: Diagnosis, names: Iterable[str], head: str = "what it is") -> Table:
    """One line for each tensor under its name in `names`, in the doctor's words; `head` says of what they are."""
    rows = []
    for name, verdict in zip(names, diagnosis, strict=True):
        everyone = len(verdict.ranks) == diagnosis.world_size
        where = "all" if everyone else ", ".join(map(str, verdict.ranks))
        error = "" if verdict.error is None or verdict.healthy else f"{verdict.error:.2g}"
        rows.append(Row(verdict.healthy, (name, verdict.words, where, error)))
    return ("", head, "wrong on ranks", "largest error"), tuple(rows)


def gradient_table(diagnosis: Diagnosis) -> Table:
    """One line for each parameter's gradient."""
    return verdict_table(diagnosis, [f"{verdict.name}.grad" for verdict in diagnosis])


def traffic_table(rank: int, traffic: Traffic, wrong: Sequence = ()) -> Table:
    """What one rank has communicated, call by call; the rows in `wrong` are marked (all, if there are none)."""
    rows = tuple(
        Row(
            bool(wrong) and row not in wrong,
            (
                f"rank {rank}",
                row.operation,
                f"{row.size}",
                "in backward" if row.backward else "outside",
                str(row.line or ""),
            ),
        )
        for row in traffic
    )
    return ("", "operation", "bytes of the tensor", "when", "called from"), rows


def operations(rows: Sequence) -> str:
    """
    >>> from course_utils.traffic import Row as Sent
    >>> operations([Sent(0, "all_reduce", (0, 1), (), 8)] * 2 + [Sent(0, "barrier", (0, 1), (), 0)])
    '2 all-reduces and 1 barrier'
    """
    names = [row.operation.replace("_", "-") for row in rows]
    return enumerated(times(names.count(name), name) for name in dict.fromkeys(names))


def unseen(found: list[dict], needed: int) -> Report | None:
    """Right gradients that some rank can't have communicated by what was counted: it called where nobody counts."""
    seen = [sum(row.size for row in one["traffic"]) for one in found]
    rank = seen.index(min(seen))
    if len(found) == 1 or seen[rank] >= needed:
        return None
    return Report(
        False,
        f"the gradients are right, but only {times(seen[rank], 'byte')} of their {needed} could be seen: call "
        "collectives from the thread that calls you",
        *traffic_table(rank, found[rank]["traffic"]),
        hint="what another thread calls isn't counted, nor what goes round torch.distributed's functions; "
        "async_op=True needs no thread",
    )


def resized(found: list[dict]) -> Report | None:
    """Parameters that have come or gone."""
    for rank, one in enumerate(found):
        if one["resized"]:
            names = enumerated(one["resized"])
            return Report(False, f"model.parameters() has changed on rank {rank} ({names}): only gradients should")
    return None


ALIKE = "all ranks must call the same collectives, on tensors of the same sizes, in the same order"


def failed(error: RankError, where: str, hint: str, alike: str = ALIKE) -> Report:
    """The report on ranks that failed, with `hint` if they raised something, and `alike` if they parted ways.

    Raises:
        RankError: the same, where nothing is known about it that `check` doesn't know.
    """
    text = str(error)
    if error.error_type == "NotImplementedError" or "still running" in text:
        raise error
    first, *more = text.splitlines()
    if isinstance(error, RankTimeout):
        return Report(False, f"the ranks hang {where}", detail=text, hint=alike)
    parted = any(sign in text for sign in ("don't agree", "without calling it", "SIGABRT"))  # Gloo gives up on sizes
    return Report(False, f"{first} ({where})", detail="\n".join(more), hint=alike if parted else hint)
