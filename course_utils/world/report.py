"""What went wrong in a world, in sentences: from the ranks' own words to one report.

Pure functions on plain values; nothing here waits, prints or touches a process.
"""

from __future__ import annotations

import math
import re
import signal
from dataclasses import dataclass, field

from . import frames


@dataclass
class Fate:
    """How one rank ended, or where it stood when the others failed."""

    rank: int
    kind: str  # "returned", "raised", "died", "running", "silent"
    time: float = math.inf
    error: dict = field(default_factory=dict)  # of "raised"
    stack: list = field(default_factory=list)  # of "running" and "died"
    waits: dict | None = None  # the call into torch.distributed it is in
    records: list = field(default_factory=list)  # the collectives it called
    messages: list = field(default_factory=list)  # what it sent to and received from other ranks
    status: int = 0  # of "died"


def ranks_text(ranks) -> str:
    ranks = sorted(ranks)
    if len(ranks) == 1:
        return f"rank {ranks[0]}"
    if len(ranks) > 6 and ranks == list(range(ranks[0], ranks[-1] + 1)):
        return f"ranks {ranks[0]} to {ranks[-1]}"
    return "ranks " + ", ".join(map(str, ranks))


def _verb(ranks, one: str, many: str) -> str:
    return f"{ranks_text(ranks)} {one if len(ranks) == 1 else many}"


# ---------------------------------------------------------------- did the ranks call the same things?

_BY_OUTPUT = {"scatter"}  # only the root has an input
_ROOTED = {"broadcast", "reduce", "gather", "scatter"}
_UNEVEN = {"all_to_all"}  # sizes may differ between ranks


def _comparable(record) -> tuple:
    """What must be equal on every rank for the call to mean anything."""
    tensors = record["outputs"] if record["operation"] in _BY_OUTPUT else record["inputs"]
    if record["operation"] in _UNEVEN:
        return record["operation"], tuple(d for d, _ in tensors[:1]), None
    return record["operation"], tuple(d for d, _ in tensors), tuple(math.prod(s) for _, s in tensors)


def tensors_text(record) -> str:
    tensors = record["outputs"] if record["operation"] in _BY_OUTPUT else record["inputs"]
    shown = ", ".join(f"{dtype}{list(size)}" for dtype, size in tensors[:2])
    return shown + (f" and {len(tensors) - 2} more" if len(tensors) > 2 else "")


def _calls(fates: list[Fate]) -> dict:
    """group -> rank -> number in this run -> call, of ranks of which it is known; of many calls only the last are."""
    calls: dict = {}
    known = {f.rank for f in fates if f.kind not in ("died", "silent")}
    for fate in fates:
        for record in fate.records if fate.rank in known else ():
            calls.setdefault(record["group"], {}).setdefault(fate.rank, {})[record["number"]] = record
    for (_, members), by_rank in calls.items():
        for rank in known.intersection(members or ()):
            by_rank.setdefault(rank, {})
    return calls


def mismatch(fates: list[Fate]) -> str | None:
    """The first thing that ranks did not do alike, in words; None if there is none.

    A rank that has not called a collective, or not received a message, counts only if it has returned: otherwise it may
    still come.
    """
    finished = {f.rank for f in fates if f.kind == "returned"}
    return _collectives_differ(fates, finished) or _arguments_differ(fates) or _messages_differ(fates, finished)


def difference(fates: list[Fate]) -> str | None:
    """The first thing that ranks did together but not alike: nothing can mend it, and no result may come of it.

    None where the learner's own error comes before it.
    """
    if any(f.kind == "raised" and not is_noise(f) and not _GROUPS_OWN.search(f.error.get("text", "")) for f in fates):
        return None
    return _collectives_differ(fates, set()) or _arguments_differ(fates) or _messages_differ(fates, set())


def _collectives_differ(fates, finished) -> str | None:
    for (name, members), by_rank in _calls(fates).items():
        group = "" if name in ("0", "default_pg") or members is None else f" of the group of {ranks_text(members)}"
        for number in sorted({number for calls in by_rank.values() for number in calls}):
            present = {rank: calls[number] for rank, calls in by_rank.items() if number in calls}
            absent = [rank for rank, calls in by_rank.items() if number > max(calls, default=0) and rank in finished]
            by_what: dict = {}
            for rank, record in present.items():
                by_what.setdefault(_comparable(record), []).append(rank)
            if len(by_what) > 1:
                return _describe_difference(number, group, present, by_what)
            if absent and members is not None:
                record = next(iter(present.values()))
                what = record["operation"] + (f" of {tensors_text(record)}" if tensors_text(record) else "")
                return (
                    f"{_verb(present, 'calls', 'call')} collective #{number}{group}, {what}{_place(record)}, "
                    f"and {_verb(absent, 'returns', 'return')} without calling it"
                )
    return None


def _arguments_differ(fates) -> str | None:
    """The first call with a root or a reduction on which its ranks don't agree."""
    calls: dict = {}
    for fate in fates:
        for note in fate.messages:
            if note["kind"] == "collective":
                calls.setdefault(note["group"], {}).setdefault(fate.rank, []).append(note)
    for by_rank in calls.values():
        for together in zip(*by_rank.values()):
            if len({note["name"] for note in together}) > 1:
                break  # not the same calls: what the flight recorder saw tells more
            for what in together[0]["agreed"]:
                said = {rank: note["agreed"].get(what) for rank, note in zip(by_rank, together)}
                if len(set(said.values())) > 1:
                    parts = ", ".join(f"rank {rank} says {what}={value}" for rank, value in said.items())
                    return f"the ranks don't agree on {what} in {together[0]['name']}: {parts}"
    return None


def _messages_differ(fates, finished) -> str | None:
    sent: dict = {}
    received: dict = {}
    for fate in fates:
        for m in (m for m in fate.messages if m["kind"] != "collective"):
            ends = (fate.rank, m["peer"]) if m["kind"] == "send" else (m["peer"], fate.rank)
            (sent if m["kind"] == "send" else received).setdefault((*ends, m["group"], m["tag"]), []).append(m)
    for (source, target, group, tag), out in sent.items():
        into = received.get((source, target, group, tag), [])
        for i, (a, b) in enumerate(zip(out, into)):
            if (a["dtype"], math.prod(a["size"])) != (b["dtype"], math.prod(b["size"])):
                what = f"message #{i + 1} from rank {source} to rank {target}"
                return f"{what} is sent as {a['dtype']}{a['size']} and received as {b['dtype']}{b['size']}"
        if len(out) > len(into) and {source, target} <= finished:
            extra = out[len(into)]
            return (
                f"rank {source} sends message #{len(into) + 1} to rank {target}, {extra['dtype']}{extra['size']}, "
                f"and rank {target} returns without receiving it"
            )
    return None


def _place(record) -> str:
    return f" ({frames.where(record['place'])})" if record.get("place") else ""


def _describe_difference(number, group, present, by_what) -> str:
    same_operation = len({what[0] for what in by_what}) == 1
    parts = []
    for ranks in by_what.values():
        record = present[ranks[0]]
        verb = "comes" if len(ranks) == 1 else "come"
        what = f"{verb} with {tensors_text(record) or 'nothing'}"
        if not same_operation:
            what = f"call{'s' if len(ranks) == 1 else ''} {record['operation']}"
            what += f" of {tensors_text(record)}" if tensors_text(record) else ""
        parts.append(f"{ranks_text(ranks)} {what}{_place(record)}")
    head = f"collective #{number}{group}"
    if same_operation:
        head = f"{next(iter(by_what))[0]}, " + head
    return f"the ranks don't agree in {head}: " + "; ".join(parts)


# ---------------------------------------------------------------- one report out of all fates

_NOISE = re.compile(
    r"closed by peer|reset by peer|Broken pipe|Socket closed|onnection refused|remote process exited", re.I
)


_GROUPS_OWN = re.compile(r"gloo|NCCL|process group", re.I)  # an error that comes from the collective itself


def is_noise(fate: Fate) -> bool:
    """Only the echo of another rank's end."""
    return fate.kind == "raised" and bool(_NOISE.search(fate.error.get("text", "")))


def clean(text: str) -> str:
    """A message of torch's without its C++ stack and the numbers of ports."""
    text = re.split(r"\nException raised from|\nC\+\+ CapturedTraceback", text)[0].rstrip()
    text = re.sub(r"\[/[^\]]*/(gloo/[^\]]*)\]", r"[\1]", text)
    return re.sub(r"\[?(127\.0\.0\.1|::1|localhost)\]?:\d+", "another rank", text)


def failure(fates: list[Fate]) -> tuple[Fate, str]:
    """The rank that failed first, and the report."""
    failed = sorted((f for f in fates if f.kind in ("raised", "died")), key=lambda f: (is_noise(f), f.time))
    first = failed[0]
    same = [f for f in failed if f.kind == "raised" and first.kind == "raised" and _same_error(f, first)]
    ranks = [f.rank for f in same] or [first.rank]
    lines = [_headline(first, ranks, len(fates))]
    different = mismatch(fates)
    if different:
        lines.append(f"Why: {different}." if is_noise(first) or first.kind == "died" else f"Before that, {different}.")
    elif first.kind == "died":
        lines += _called_beside(first, fates)
    lines += _where_it_failed(first)
    others = [f for f in fates if f.rank not in ranks]
    lines += _others(others, fates)
    return first, "\n".join(lines)


def _called_beside(dead: Fate, fates: list[Fate]) -> list[str]:
    """What the rank that died was calling, where the others were calling something else."""
    own = frames.called_in_torch(dead.stack)
    names = {f.rank: _name_of_call(f) for f in fates if f is not dead}
    others = {name for name in names.values() if name}
    if not own or not others or others == {own}:
        return []
    parts = [f"{_verb([r for r in names if names[r] == name], 'was', 'were')} in {name}" for name in sorted(others)]
    return [f"Why: it was in {own}, and {', '.join(parts)}: what one rank sends, another takes for something else."]


def _name_of_call(fate: Fate) -> str | None:
    stack = fate.error.get("stack_of_error", []) if fate.kind == "raised" else fate.stack
    return frames.called_in_torch(stack)


def _same_error(a: Fate, b: Fate) -> bool:
    return all(a.error.get(k) == b.error.get(k) for k in ("type", "text", "stack_of_error"))


def _headline(fate: Fate, ranks, size: int) -> str:
    who = "every rank" if len(ranks) == size > 1 else ranks_text(ranks)
    if fate.kind == "died":
        return f"{who} {ending(fate.status)}"
    kind, text = fate.error["type"], clean(fate.error["text"])
    if not kind:
        return f"{who}: {text}"
    return f"{who} raised {kind}" + (f": {text}" if text else "")


def ending(status: int) -> str:
    """The end of a process in words, from its wait status."""
    if status < 0:
        return (
            "was lost: the process that starts ranks has ended, or the system allowed no more processes or open files"
        )
    if status & 0x7F:
        number = status & 0x7F
        name = signal.Signals(number).name if number in set(signal.Signals) else f"signal {number}"
        hint = {
            "SIGKILL": ": usually the system had run out of memory",
            "SIGABRT": ": a library gave up; its message is among the rank's output above",
            "SIGSEGV": ": a crash in compiled code",
        }.get(name, "")
        return f"was ended by {name}{hint}"
    return f"ended the process with exit code {status >> 8}, in the middle of the call"


def _where_it_failed(fate: Fate) -> list[str]:
    stack = fate.error.get("stack_of_error") if fate.kind == "raised" else fate.stack
    if not stack:
        return []
    places = frames.mine(stack)
    lines = [f"  from {frames.where(place)}" for place in places[:-1]]
    if len(lines) > 10:  # a recursion
        lines[5:-5] = [f"  ... {len(lines) - 10} more calls"]
    shown = frames.excerpt(places[-1])
    lines.append(f"  in {frames.where(places[-1])}")
    if shown:
        lines[-1] = f"  in {frames.where(places[-1]).split(':')[0]}:"
        lines.append(shown)
    if fate.error.get("cause"):
        lines.append(f"  because of {clean(fate.error['cause'])}")
    if fate.kind == "died":
        lines[0] = lines[0].replace("  in", "  it was last seen in", 1)
    return lines


def _doing(fate: Fate, pending: dict) -> str:
    """What a rank is doing, as the end of a sentence."""
    if fate.kind == "returned":
        return "had returned"
    if fate.kind == "raised":
        place = frames.mine(fate.error.get("stack_of_error") or [])
        at = f", {frames.where(place[-1])}" if place else ""
        if not is_noise(fate):
            return f"raised {fate.error['type']}{at}"
    else:
        place = frames.mine(fate.stack)
        at = f", {frames.where(place[-1])}" if place else ""
    if fate.kind == "died":
        return ending(fate.status)
    if fate.kind == "silent":
        return "did not answer (it is busy inside compiled code)"
    if fate.rank in pending:
        number, record = pending[fate.rank]
        what = tensors_text(record)
        return f"waiting in {record['operation']} (collective #{number})" + (f" of {what}" if what else "") + at
    if fate.waits:
        what = f" of {fate.waits['tensor']}" if fate.waits["tensor"] else ""
        peer = f", {fate.waits['peer']}" if fate.waits["peer"] else ""
        return f"waiting in {fate.waits['name']}{what}{peer}{at}"
    return f"running{at}" if fate.kind == "running" else f"lost the connection to another rank{at}"


def _pending(fates: list[Fate]) -> dict:
    """rank -> (number, record) of the last collective it called and some member has not."""
    pending = {}
    for by_rank in _calls(fates).values():
        fewest = min(max(calls, default=0) for calls in by_rank.values())
        for rank, calls in by_rank.items():
            if fewest + 1 in calls:
                pending[rank] = (fewest + 1, calls[fewest + 1])
    return pending


def _others(others: list[Fate], fates: list[Fate]) -> list[str]:
    pending = _pending(fates)
    by_text: dict = {}
    for fate in others:
        by_text.setdefault(_doing(fate, pending), []).append(fate.rank)
    lines = []
    for text, ranks in by_text.items():
        if len(ranks) > 1:
            text = text.replace("was ended", "were ended", 1).replace("was lost", "were lost", 1)
        if text.startswith(("waiting", "running")):
            text = f"{'was' if len(ranks) == 1 else 'were'} {text}"
        lines.append(f"  {ranks_text(ranks)} {text}")
    return lines


def hang(fates: list[Fate], seconds: float) -> str:
    """The report at the deadline: for every rank the collective, the shapes and the line."""
    running = [f for f in fates if f.kind in ("running", "silent")]
    pending = _pending(fates)
    waiting = [f for f in running if f.rank in pending or f.waits]
    if not waiting:
        head = f"{_verb([f.rank for f in running], 'was', 'were')} still running after {seconds:g} s"
        head += ": if the work is only slow, give it more time with timeout=…"
    else:
        head = f"the ranks waited for each other until the timeout of {seconds:g} s"
    return "\n".join(
        [head, *_why(fates, waiting, pending), *_others(sorted(fates, key=lambda f: f not in waiting), fates)]
    )


def interrupted(fates: list[Fate]) -> str:
    return "\n".join(["the call was interrupted, and its ranks are ended", *_others(fates, fates)])


def stuck(fates: list[Fate]) -> str | None:
    """The report for ranks that wait for one that has returned; None while every rank may still come."""
    if mismatch(fates) is None:
        return None
    head = "the ranks wait for each other and would do so forever"
    return "\n".join([head, *_why(fates, [], _pending(fates)), *_others(fates, fates)])


def _why(fates, waiting, pending) -> list[str]:
    different = mismatch(fates)
    if different:
        return [f"Why: {different}."]
    missing = [f.rank for f in fates if pending and f.rank not in pending and f not in waiting]
    if missing:
        number, record = next(iter(pending.values()))
        return [f"Why: {ranks_text(missing)} never came to {record['operation']} (collective #{number})."]
    roots = {(f.waits["name"], f.waits["peer"]): f.rank for f in waiting if f.waits and f.waits["peer"]}
    names = {name for name, _ in roots}
    if len(roots) > 1 and len(names) == 1 and names <= _ROOTED:
        said = ", ".join(f"rank {rank} says {peer}" for (_, peer), rank in roots.items())
        return [f"Why: the ranks don't agree on the root of {names.pop()}: {said}."]
    if waiting and not pending and {f.waits["name"] for f in waiting if f.waits} <= {"send", "recv"}:
        return ["Why: each of them waits for a message that nobody sends, or sends one that nobody receives."]
    return []
