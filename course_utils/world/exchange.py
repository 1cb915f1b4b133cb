"""One call on a crew: what comes back, when to stop waiting, and which error to raise for it."""

from __future__ import annotations

import contextlib
import math
import pickle
import time
from multiprocessing import connection

from . import frames, report
from .errors import RankError, RankTimeout
from .output import Output

GRACE = 0.25  # seconds that the other ranks have to fail or finish by themselves once one has failed
FIRST_LOOK = 0.5  # seconds after which a call that isn't back is looked at, then after three times as long, and so on
JOINING = 120.0  # seconds that the ranks may take to find each other
DRAINING = 1.0  # seconds


class Exchange:
    """One call on a crew: collects replies and output until every rank has answered, or it is clear that some won't."""

    def __init__(self, crew, joined: set[int], stream: bool):
        self.crew, self.joined = crew, joined
        self.size = len(crew.conns)
        self.outputs = [Output(rank, stream) for rank in range(self.size)]
        self.replies: dict[int, tuple[str, dict]] = {}
        self.places: dict[int, dict] = {}  # answers to "where"
        self.lost: dict[int, float] = {}  # rank -> when its connection ended
        self.refused: Exception | None = None
        self.timed_out = False
        self.hopeless = False

    def collect(self, seconds: float) -> None:
        """Until all is in, or `seconds` have passed since the last rank joined the group."""
        trouble = math.inf  # when the first failure was seen
        start = None
        deadline = next_look = time.monotonic() + JOINING
        while True:
            missing = [r for r in range(self.size) if r not in self.replies and r not in self.lost]
            if not missing or self.refused:
                break
            if start is None and len(self.joined) == self.size:
                start = time.monotonic()
                deadline, next_look = start + seconds, start + FIRST_LOOK
            until = min(deadline, trouble + GRACE, next_look)
            left = until - time.monotonic()
            if left > 0:
                self._wait(None if left == math.inf else left)
            elif until == next_look and start is not None:  # is it certain that they can't ever finish?
                # asked twice, for a rank's answer may be older than its result and yet come in after it
                if all(report.mismatch(self.fates(asking=missing)) for _ in range(2)):
                    self.hopeless = True
                    break
                next_look = time.monotonic() + 2 * (time.monotonic() - start)
            else:
                self.timed_out = trouble == math.inf
                break
            if trouble == math.inf and (self.lost or any(kind == "raised" for kind, _ in self.replies.values())):
                trouble = time.monotonic()
        if self.lost:
            self._until(lambda: set(self.lost) <= set(self.crew.endings), 1)
        self._drain()

    def _until(self, condition, seconds: float) -> None:
        end = time.monotonic() + seconds
        while not condition() and (left := end - time.monotonic()) > 0:
            self._wait(left)

    def _wait(self, seconds: float | None) -> None:
        sources: dict = {conn: ("reply", r) for r, conn in enumerate(self.crew.conns) if r not in self.lost}
        sources |= {out: ("output", r) for r, out in enumerate(self.crew.outputs) if not self.outputs[r].ended}
        waitables = self.crew.waitables
        for ready in connection.wait([*sources, *waitables], seconds):
            if ready in waitables:
                self.crew.read_endings()
                continue
            what, rank = sources[ready]
            if what == "output":
                self.outputs[rank].read(ready)
            else:
                self._reply(rank, ready)

    def _reply(self, rank: int, conn) -> None:
        try:
            kind, content = pickle.loads(conn.recv_bytes())
        except (EOFError, OSError):
            self.lost.setdefault(rank, time.monotonic())
            return
        if kind == "where":
            self.places[rank] = content
        elif kind == "refused":
            kinds = {"ValueError": ValueError}
            self.refused = kinds.get(content["type"], RuntimeError)(report.clean(content["text"]))
        elif kind == "joined":
            self.joined.add(rank)
        else:
            self.replies[rank] = (kind, content)
            if rank in self.places:  # where it was a moment ago: it has answered, and called more since
                self.places[rank] = {}

    def _drain(self) -> None:
        """Everything that was printed before the answer is in the pipe by now; who goes on printing is cut off."""
        end = time.monotonic() + DRAINING
        for rank, out in enumerate(self.crew.outputs):
            while not self.outputs[rank].ended and connection.wait([out], 0) and time.monotonic() < end:
                self.outputs[rank].read(out)

    def print(self) -> None:
        for output in self.outputs:
            output.print()

    def ask_where(self, ranks, lines: bool, seconds: float) -> None:
        """Ask ranks where they are; `lines` adds the line of each collective, which is slow."""
        self.places = {}
        if not ranks:
            return
        message = pickle.dumps(("where", {"frames": lines}))
        asked = [r for r in ranks if r not in self.lost]
        for rank in asked:
            with contextlib.suppress(OSError):
                self.crew.conns[rank].send_bytes(message)
        self._until(lambda: all(r in self.places or r in self.lost for r in asked), seconds)

    # ------------------------------------------------------------ what to say of it

    def problem(self, timeout) -> RankError | None:
        """The error to raise for this call; None if every rank returned and all called the same collectives."""
        missing = [r for r in range(self.size) if r not in self.replies and r not in self.lost]
        fates = self.fates(asking=missing)
        different = report.mismatch(fates) is not None
        if different:  # once more, with the line of each collective: slow, and worth it now
            fates = self.fates(asking=range(self.size), lines=True)
        difference = report.difference(fates)
        if difference or (different and all(fate.kind == "returned" for fate in fates)):
            return RankError(f"no result, for it would be wrong: {difference or report.mismatch(fates)}")
        if self.hopeless:
            return RankTimeout(report.stuck(fates) or report.hang(fates, timeout))
        if self.timed_out:
            return RankTimeout(report.hang(fates, timeout))
        if any(fate.kind != "returned" for fate in fates):
            first, text = report.failure(fates)
            return RankError(text, first.rank, first.error.get("type"))
        return None

    def interrupted(self) -> str:
        fates = self.fates(asking=range(self.size), seconds=0.3)
        self._drain()
        return report.interrupted(fates)

    def fates(self, asking, lines: bool = False, seconds: float = 1) -> list[report.Fate]:
        self.ask_where(asking, lines, 10 if lines else seconds)
        return [self._fate(rank) for rank in range(self.size)]

    def _fate(self, rank: int) -> report.Fate:
        kind, content = self.replies.get(rank, (None, {}))
        place = self.places.get(rank, {})
        calls = {what: place.get(what) or content.get(what) or [] for what in ("records", "messages")}
        if kind == "done":
            return report.Fate(rank, "returned", **calls)
        if kind == "raised":
            return report.Fate(rank, "raised", content["time"], error=content, waits=content.get("waits"), **calls)
        if rank in self.lost:
            status, notes = self.crew.endings.get(rank, (0, {}))
            stack = frames.of_crash(notes.get("crash", ""))
            if not stack and notes.get("place"):
                stack = pickle.loads(notes["place"])
            return report.Fate(rank, "died", self.lost[rank], stack=stack, status=status, **calls)
        if rank in self.places:
            return report.Fate(rank, "running", stack=place["stack"], waits=place["waits"], **calls)
        return report.Fate(rank, "silent")
