"""`torchrun … -m course_utils.collectives`: the table that nccl-tests would print, on whatever ranks there are.

    torchrun --standalone --nproc-per-node 2 -m course_utils.collectives --op all_reduce --begin 1K --end 64M --factor 4

Columns as in nccl-tests: size in bytes, count in elements (all-gather, all-to-all and reduce-scatter: of the whole
array), type, redop, root, time in µs, algorithm and bus bandwidth in 10^9 bytes per second, and the number of wrong
elements, from a check of the last result on every rank. Unlike nccl-tests, each repetition starts at a barrier, and the
time is the median over repetitions of the slowest rank's. Written for GPUs and NCCL too, and not yet run on them.
"""

from __future__ import annotations

import argparse
import os
import re
import sys
from collections.abc import Sequence

from .bandwidth import OPERATIONS, Timing
from .fitting import fit

ALONE = (
    "course_utils.collectives times a collective between processes, and this is one process alone: start it with "
    "`torchrun --standalone --nproc-per-node 2 -m course_utils.collectives`, as many processes as there are GPUs or "
    "cores."
)


def main(arguments: Sequence[str] | None = None) -> int:
    options = _options(arguments)
    if not all(name in os.environ for name in ("RANK", "WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT")):
        print(ALONE, file=sys.stderr)
        return 2
    import torch
    import torch.distributed as dist

    rank, ranks = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
    local, here = int(os.environ.get("LOCAL_RANK", rank)), int(os.environ.get("LOCAL_WORLD_SIZE", ranks))
    gpus = torch.cuda.device_count()
    if options.device == "cuda" and gpus < here:
        say = f"--device cuda needs a GPU for each of the {here} processes of this machine, which has {gpus}."
        print(say, file=sys.stderr) if local == 0 else None
        return 2
    on_gpu = options.device == "cuda" or (options.device == "auto" and gpus >= here)
    if on_gpu:
        torch.cuda.set_device(local)
        torch.set_default_device(f"cuda:{local}")
    dist.init_process_group("nccl" if on_gpu else "gloo")
    try:
        return _table(options, rank == 0, "GPU, NCCL" if on_gpu else "CPU, Gloo")
    finally:
        dist.destroy_process_group()


def _table(options: argparse.Namespace, prints: bool, where: str) -> int:
    from .live import time_on_ranks

    def say(line: str) -> None:
        if prints:
            print(line, flush=True)

    rows: list[Timing] = []
    for size in _sizes(options.begin, options.end, options.factor):
        try:
            table = time_on_ranks(options.op, [size], options.warmup, options.iters, "all_reduce", None)
        except ValueError as error:  # a size below one element for each rank
            say(f"# {error}")
            return 2
        if not rows:
            say(
                f"# {options.op} on {table.rows[0].ranks} ranks ({where}): the median of {options.iters} calls, after "
                f"{options.warmup} to warm up; of each call the slowest rank's time"
            )
            say(_line("#       size", "count", "type", "redop", "root", "time", "algbw", "busbw", "#wrong"))
            say(_line("#        (B)", "(elements)", "", "", "", "(us)", "(GB/s)", "(GB/s)", ""))
        rows += table
        say(_row(rows[-1]))
    wrong = sum(row.wrong for row in rows)
    say(f"# Wrong elements : {wrong} {'OK' if wrong == 0 else 'FAILED'}")
    say(f"# Avg bus bandwidth : {sum(row.busbw for row in rows) / len(rows) / 1e9:.4g} GB/s")
    if len({row.size for row in rows}) >= 3:
        found = fit([row.size for row in rows], [row.seconds for row in rows])
        say(f"# time = α + size·β, relative errors weighted alike : {str(found).replace(' per step', ' per call')}")
    return 0 if wrong == 0 else 1


def _row(row: Timing) -> str:
    redop = "sum" if row.operation in ("all_reduce", "reduce_scatter", "reduce") else "none"
    root = "0" if row.operation in ("broadcast", "reduce") else "-1"
    rates = (f"{row.algbw / 1e9:.3f}", f"{row.busbw / 1e9:.3f}")
    time = f"{1e6 * row.seconds:.2f}"
    return _line(str(row.size), str(row.size // 4), "float", redop, root, time, *rates, str(row.wrong))


def _line(*cells: str) -> str:
    return "  ".join(cell.rjust(width) for cell, width in zip(cells, (12, 12, 6, 6, 4, 10, 8, 8, 6)))


def _sizes(begin: int, end: int, factor: float) -> list[int]:
    sizes, size = [], float(begin)
    while size <= end:
        sizes.append(int(size))
        size *= factor
    return list(dict.fromkeys(sizes))


def _options(arguments: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        prog="torchrun … -m course_utils.collectives",
        description="Time a collective as nccl-tests does. Sizes are bytes, or as in 8K, 4M, 1G (powers of 1024).",
    )
    add = parser.add_argument
    add("--op", choices=OPERATIONS, default="all_reduce", help="the operation (default: all_reduce)")
    add("--begin", "-b", type=_size, default=1024, help="smallest size (default: 1K)")
    add("--end", "-e", type=_size, default=64 * 2**20, help="largest size (default: 64M)")
    add("--factor", "-f", type=_factor, default=4.0, help="from one size to the next (default: 4)")
    add("--warmup", "-w", type=_count(0), default=5, help="calls that don't count, for each size (default: 5)")
    add("--iters", "-n", type=_count(1), default=20, help="calls that do (default: 20)")
    add("--device", choices=("auto", "cpu", "cuda"), default="auto", help="auto: GPUs if each process has one")
    options = parser.parse_args(arguments)
    if options.begin > options.end:
        parser.error(f"--begin {options.begin} is above --end {options.end}: no size would be left")
    return options


def _size(text: str) -> int:
    found = re.fullmatch(r"(\d+)\s*([KMG]?)B?", text.strip(), re.IGNORECASE)
    value = int(found[1]) * 1024 ** " KMG".index(found[2].upper() or " ") if found else 0
    if value < 1:
        raise argparse.ArgumentTypeError(
            f"{text!r} is no size: a whole number above 0 was expected, as in 8, 64K or 1G"
        )
    return value


def _factor(text: str) -> float:
    try:
        value = float(text)
    except ValueError:
        value = 0.0
    if not 1 < value < float("inf"):
        raise argparse.ArgumentTypeError(f"{text!r} is no factor: a number above 1 was expected")
    return value


def _count(least: int):
    def count(text: str) -> int:
        if not text.isdecimal() or int(text) < least:
            raise argparse.ArgumentTypeError(f"{text!r} is no count: a whole number was expected, {least} or more")
        return int(text)

    return count


if __name__ == "__main__":
    sys.exit(main())
