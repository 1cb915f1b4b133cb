"""Timeline: what each rank did when, from a simulator, a formula or a live run.

A `Timeline` is a tuple of `Event`s `(rank, start, stop, kind, name)`, in seconds. Simulators produce it, and so does
`recording()` in a live rank, by `time.monotonic`, which all processes of one machine share (POSIX, CLOCK_MONOTONIC);
`merge` puts the ranks' parts together. It is shown by `str()` and a notebook as text, by `course_utils.plots.gantt` as
a figure, and by https://ui.perfetto.dev once `write_trace` has written it in Chrome's Trace Event Format.

Modules: `value` (events, their sums and parts), `views` (text, and a file for Perfetto), `recording` (of a live rank).
"""

from __future__ import annotations

from .recording import Recorder, note, recording
from .value import KINDS, Event, Timeline, merge

__all__ = ["KINDS", "Event", "Recorder", "Timeline", "merge", "note", "recording"]
