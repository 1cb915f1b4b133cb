"""The errors of a call on ranks. Each carries its whole report as text, and a notebook shows nothing else of it."""

from __future__ import annotations


class RankError(RuntimeError):
    """A rank failed, or the ranks did not do the same thing.

    Attributes:
        rank: the rank that failed first; None if none did by itself.
        error_type: the name of the exception it raised; None if it raised none.
    The text is the whole report.
    """

    def __init__(self, text: str, rank: int | None = None, error_type: str | None = None):
        super().__init__(text)
        self.rank = rank
        self.error_type = error_type

    def _render_traceback_(self):  # what a notebook shows: the report, not the way through this package
        return f"{type(self).__name__}: {self}".splitlines()


class RankTimeout(RankError):
    """The ranks waited for each other, until the deadline or without any hope; the text says where every rank was."""


class Interrupted(KeyboardInterrupt):
    """The user interrupted a call; its ranks are ended. The text says where they were."""

    _render_traceback_ = RankError._render_traceback_
