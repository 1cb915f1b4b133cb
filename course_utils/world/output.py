"""What ranks print, and what is said while one waits."""

from __future__ import annotations

import contextlib
import os
import sys

LONGEST_LINE = 2**20  # bytes; of a longer one the end is shown
MOST_LINES = 1000  # of one rank in one call, at each end; what lies between is counted, not kept


class Output:
    """The lines of one rank: `[rank 2] loss 0.31`.

    A carriage return starts the line over, as on a terminal: of a progress bar only its last state is a line.
    """

    def __init__(self, rank: int, stream: bool):
        self.label = f"[rank {rank}] "
        self.stream = stream
        self.ended = False
        self.rest = bytearray()
        self.first: list[str] = []
        self.last: list[str] = []
        self.left_out = 0

    def read(self, source) -> None:
        try:
            data = os.read(source, 65536) if isinstance(source, int) else source.recv_bytes()
        except (EOFError, OSError):
            data = b""
        if not data:
            self.ended = True
            return
        first, *lines = data.split(b"\n")
        self.rest += first
        if not lines:
            if len(self.rest) > LONGEST_LINE:  # a progress bar's past, or a line that nobody could read
                del self.rest[: max(self.rest.rfind(b"\r", 0, -1) + 1, len(self.rest) - LONGEST_LINE // 2)]
            return
        self._line(bytes(self.rest))
        *lines, rest = lines
        self.rest = bytearray(rest)
        for line in lines:
            self._line(line)

    def _line(self, raw: bytes) -> None:
        line = self.label + raw.rstrip(b"\r").rpartition(b"\r")[2].decode("utf-8", "replace")
        if self.stream:
            print(line, flush=True)
        elif len(self.first) < MOST_LINES:
            self.first.append(line)
        else:
            self.last.append(line)
            if len(self.last) > 2 * MOST_LINES:
                self.left_out += len(self.last) - MOST_LINES
                del self.last[:-MOST_LINES]

    def print(self) -> None:
        """Print what has not been printed yet, an unfinished line too."""
        if self.rest.strip(b"\r"):
            self._line(bytes(self.rest))
            self.rest = bytearray()
        cut = max(0, len(self.last) - MOST_LINES)
        self.left_out += cut
        lines = [*self.first]
        if self.left_out:
            lines.append(f"{self.label}... {self.left_out:,} lines are left out here; stream=True shows all of them")
        lines += self.last[cut:]
        if lines:
            sys.stdout.write("\n".join(lines) + "\n")
            sys.stdout.flush()
        self.first, self.last, self.left_out = [], [], 0


@contextlib.contextmanager
def status_line(text: str):
    """Show a line while something takes its time, and take it away afterwards, where somebody watches.

    A notebook that a program runs (nbval, nbconvert) keeps whatever it was ever sent: there nothing is shown.
    """
    ipython = sys.modules.get("IPython")
    shell = ipython and ipython.get_ipython()
    kernel = getattr(shell, "kernel", None)
    if kernel is not None:
        watched = getattr(kernel, "_allow_stdin", False)  # whoever could answer a question can see a line
        line = ipython.display.display({"text/plain": text}, raw=True, display_id=True) if watched else None
        try:
            yield
        finally:
            if line is not None:
                line.update({}, raw=True)
    elif sys.stdout.isatty():
        sys.stdout.write(text)
        sys.stdout.flush()
        try:
            yield
        finally:
            sys.stdout.write("\r" + " " * len(text) + "\r")
            sys.stdout.flush()
    else:
        yield
