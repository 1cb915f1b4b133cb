"""`examine` produces the report on a function: live ranks against its twin on a single process; `check` shows it.

What is looked at, in this order: does the call make sense; does the function run, and return what was asked for; is the
result right; do gradients flow back through what has a backward only; are they right, in the doctor's words; what did
it communicate. The first thing that is wrong is the answer, at the first number of ranks at which it is wrong.
"""

from __future__ import annotations

import contextlib
import difflib
import inspect
import io
import sys
import textwrap
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace

import torch

from course_utils.gradients import Diagnosis, diagnose
from course_utils.grading import (
    all_reduces,
    assumptions,
    clipping,
    held_bytes,
    overlapped,
    probe,
    sharded_autograd,
    token_mean,
    zero,
)
from course_utils.grading.exercises import AllReduce, Case, Evidence, Exercise, Input, Sent, Sizes
from course_utils.grading.judged import Judged
from course_utils.grading.reports import Report, Row
from course_utils.grading.wording import enumerated, gradient_table, ranks, verdict_table, within
from course_utils.world import RankError, RankTimeout, World
from course_utils.world.report import ranks_text

_ALL = (
    *sharded_autograd.EXERCISES,
    assumptions.SUSPECTS,
    held_bytes.HELD,
    *all_reduces.EXERCISES,
    overlapped.DURING_BACKWARD,
    token_mean.ACCUMULATE,
    zero.ZERO_2,
    clipping.CLIP,
)
EXERCISES = {one.name: one for one in _ALL}


class CheckFailed(AssertionError):
    """A check that did not pass; `report` says why, and so does the text."""

    def __init__(self, report: Report, shown: bool = False):
        super().__init__(str(report))
        self.report = report
        self.shown = shown  # in the notebook, above the error

    def _render_traceback_(self):  # what a notebook shows: the answer, not the way through this package
        if not self.shown:
            return str(self).splitlines()
        return [f"{type(self).__name__}: not right yet, see above ({self.report.headline})"]


def check(
    name: str, fn: Callable, *, world_sizes: Sequence[int] = (2, 3, 4), seed: int = 0, timeout: float = 20
) -> None:
    """Show whether `fn` is a right answer to the exercise `name`, and if not, in which way it is wrong.

    It returns nothing: nbgrader would read the value of a graded cell as a number of points.

    Args: as for `examine`.

    Raises:
        CheckFailed: it is not right. In a notebook the report is shown, and the error is one line; elsewhere the
            text of the error is the report.
    """
    report = examine(name, fn, world_sizes=world_sizes, seed=seed, timeout=timeout)
    shown = _show(report)
    if not report.passed:
        raise CheckFailed(report, shown)
    if not shown:
        print(report)


def _show(report: Report) -> bool:
    """Show the report where a notebook can; whether it could."""
    if "IPython" not in sys.modules:
        return False
    from IPython import get_ipython
    from IPython.display import display

    if get_ipython() is None:
        return False
    display(report)
    return True


def examine(
    name: str, fn: Callable, *, world_sizes: Sequence[int] = (2, 3, 4), seed: int = 0, timeout: float = 20
) -> Report:
    """Run `fn` on live ranks as the exercise `name` asks; the report on it, whatever it does.

    Args:
        name: of the exercise.
        fn: the learner's function; every rank calls it with its own inputs.
        world_sizes: the numbers of ranks to try, in this order.
        seed: draws sizes and values; grading uses others than the learner has seen.
        timeout: seconds that one call may take; a hang is explained then.
    """
    complaint = _refuse(name, fn) or _refuse_world_sizes(world_sizes)
    if complaint:
        return complaint
    exercise = EXERCISES[name]
    if isinstance(exercise, Judged):
        return _judged(exercise, fn, world_sizes, seed, timeout)
    for done, world_size in enumerate(world_sizes):
        wrong = _on(exercise, fn, world_size, seed, timeout)
        if wrong:
            right_on = f"; on {ranks(*world_sizes[:done])} all is right" if done else ""
            return within(f"{name} on {ranks(world_size)}", wrong, right_on)
    return Report(True, f"{name} is right on {ranks(*world_sizes)}: {_praise(exercise)}")


def _judged(exercise: Judged, fn, world_sizes: Sequence[int], seed: int, timeout: float) -> Report:
    """The report on an exercise that looks at something else than outputs and gradients."""
    try:
        return exercise.examine(fn, world_sizes, seed, timeout)
    except RankError as error:
        return within(exercise.name, _failed(exercise, error, timeout))
    except TypeError as error:  # a function that can't be sent to the ranks
        return Report(False, str(error))


def _praise(exercise: Exercise) -> str:
    right = enumerated(["the output", *(f"{i.name}.grad" for i in exercise.inputs)])
    return f"{right}, with no more communication than it takes"


# ---------------------------------------------------------------- does the call make sense?


def _refuse(name, fn) -> Report | None:
    names = enumerated(map(repr, EXERCISES))
    if not isinstance(name, str):
        return Report(False, f"check needs the exercise's name first and then your function; the names are {names}")
    if name not in EXERCISES:
        near = difflib.get_close_matches(name, EXERCISES, 1, 0.6)
        guess = f": did you mean {near[0]!r}?" if near else "."
        return Report(False, f"there is no exercise named {name!r}{guess} The names are {names}")
    exercise = EXERCISES[name]
    call = ", ".join(i.name for i in exercise.inputs)
    as_in = f"check({name!r}, {exercise.written or name})"
    if isinstance(fn, type) and issubclass(fn, torch.autograd.Function):
        return Report(False, f"the second argument is the class {fn.__name__}: pass its function, {fn.__name__}.apply")
    if not callable(fn):
        what = f"the text {fn!r:.40}" if isinstance(fn, str) else f"of type {type(fn).__name__}"
        return Report(
            False,
            f"the second argument is {what}, not a function: pass the function itself, without calling it and without "
            f"quotation marks, as in {as_in}",
        )
    try:
        inspect.signature(fn).bind(*exercise.inputs)
    except TypeError as error:
        theirs = getattr(fn, "__name__", name) + str(inspect.signature(fn))
        return Report(False, f"{name} is called as {name}({call}), and yours is {theirs}: {error}")
    except ValueError:  # a function without a readable signature
        pass
    return None


def _refuse_world_sizes(world_sizes) -> Report | None:
    whole = isinstance(world_sizes, Sequence) and all(type(size) is int and size > 0 for size in world_sizes)
    if whole and world_sizes:
        return None
    return Report(False, f"world_sizes={world_sizes!r}: numbers of ranks were expected, as in world_sizes=(2, 3, 4)")


# ---------------------------------------------------------------- one number of ranks


def _on(exercise: Exercise, fn, world_size: int, seed: int, timeout: float) -> Report | None:
    """What is wrong on so many ranks, if anything. The second case meets what the first has left behind."""
    try:
        with World(world_size, timeout=timeout) as world:
            for again in (False, True):
                case = Case(exercise, world_size, seed + again)
                with _labelled(case, again):
                    wrong = _on_case(case, fn, world)
                if wrong:
                    other = ", with other inputs than in the call before" if again else ""
                    return replace(wrong, headline=wrong.headline + other)
    except RankError as error:
        return _failed(exercise, error, timeout)
    except TypeError as error:  # a function that can't be sent to the ranks
        return Report(False, str(error))
    return None


@contextlib.contextmanager
def _labelled(case: Case, again: bool) -> Iterator[None]:
    """What is printed inside comes out at the end, under a line that says in which call it was."""
    said = io.StringIO()
    try:
        with contextlib.redirect_stdout(said):
            yield
    finally:
        if said.getvalue():
            given = ", ".join(f"{i.name} {list(i.shape_on(1, case.sizes))}" for i in case.exercise.inputs)
            call = "the second call" if again else "the first call"
            print(f"Printed by {call} on {ranks(case.world_size)}, with {given}:\n{said.getvalue()}", end="")


def _failed(exercise: Exercise | Judged, error: RankError, timeout: float) -> Report:
    text = str(error)
    if isinstance(error, RankTimeout):
        if "still running" in text:
            return Report(False, f"no result after {timeout:g} s", detail=text)
        return Report(
            False,
            "the ranks hang",
            detail=text,
            hint="every rank must call the same collectives in the same order"
            + (", in forward and in backward" if isinstance(exercise, Exercise) else ""),
        )
    first, *more = text.splitlines()
    if error.error_type == "NotImplementedError":
        said = first.partition("NotImplementedError: ")[2]
        headline = f"not written yet: {said}" if said else "not written yet"
        return Report(False, headline, detail="\n".join(more), hint=exercise.start)
    return Report(False, first, detail="\n".join(more))


def _on_case(case: Case, fn, world: World) -> Report | None:
    exercise = case.exercise
    reference, gradients = case.reference()

    forward = world.run(probe.forward, case, fn)
    unusable = _unusable(case, forward)
    if unusable:
        return unusable
    of_output = diagnose({"output": reference}, [{"output": found["output"]} for found in forward])
    if not of_output:
        return Report(
            False,
            "the result is not what the specification gives",
            *verdict_table(of_output, ("output",)),
            hint=exercise.hint(Evidence("forward", of_output)),
        )

    backward = world.run(probe.backward)
    warning = next((found["warning"] for found in backward if found["warning"]), "")
    if warning:
        return _by_luck(warning)
    of_gradients = diagnose(gradients, [found["gradients"] for found in backward])
    if not of_gradients:
        return Report(
            False,
            f"the result is right, {_which(of_gradients)}",
            *gradient_table(of_gradients),
            hint=exercise.hint(Evidence("backward", of_gradients)),
        )
    if any(found["changed"] for found in backward):
        return Report(
            False,
            "output and gradients are right, but backward changes in place the gradient that it is given",
            hint="autograd may need that tensor for something else: work on a copy of it",
        )
    return _too_dear(case, forward, backward, of_gradients)


def _by_luck(warning: str) -> Report:
    """Gradients have gone through a collective that has no backward: right or not, they are not to be relied on."""
    *first, _ = warning.partition("future version of PyTorch.")
    return Report(
        False,
        "the result is right, but gradients flow through a collective that has no backward: any that are right are so "
        "by luck",
        detail="\n".join(textwrap.wrap(f"torch warns: {''.join(first)}", 100)),
        hint="it is called on a tensor that autograd follows, and torch hands the gradient on as if nothing had "
        "happened; call it inside an autograd function, which says what flows back",
    )


# ---------------------------------------------------------------- what came out


def _unusable(case: Case, found: list[dict]) -> Report | None:
    """A result of which no gradient can be asked."""
    said = [_complaint(case, one) for one in found]
    first = next(filter(None, said), None)
    if first is None:
        return None
    ranks = [rank for rank, complaint in enumerate(said) if complaint == first]
    where = "every rank" if len(ranks) == len(found) else ranks_text(ranks)
    what, more = first
    return Report(False, f"{what} on {where}{more}")


def _complaint(case: Case, found: dict) -> tuple[str, str] | None:
    """What is wrong with one rank's result, and what to say after the rank."""
    output = case.exercise.output
    expected = list(output.shape_on(1, case.sizes))
    if found["changed"]:
        return f"it changed its input {found['changed'][0]} in place", ": the caller still needs it, so work on a copy"
    if found["type"] == "NoneType":
        return "it returned None", ": is there a return at its end?"
    meaning = _in_words(output, case.sizes)
    if "shape" not in found:
        return f"it returned a {found['type']}", f", expected a tensor of shape {expected}: {meaning}"
    if found["shape"] != tuple(expected):
        return f"it returned a tensor of shape {list(found['shape'])}", f", expected {expected}: {meaning}"
    if found["dtype"] is not torch.float32:
        return f"it returned {str(found['dtype']).removeprefix('torch.')}", ", expected float32 like the inputs"
    if not found["grows"]:
        return (
            "the result is cut off from the inputs",
            ", so no gradient can flow back: look for detach(), no_grad(), .data, or a collective that has no backward",
        )
    return None


def _in_words(output: Input, sizes: Sizes) -> str:
    if output.sharded is None:
        return f"[{', '.join(output.shape)}], whole on every rank"
    if sizes[output.sharded] == 1:
        return f"[{', '.join(output.shape)}], one {output.sharded} on each rank"
    shape = ", ".join(f"{d} / world_size" if d == output.sharded else d for d in output.shape)
    return f"[{shape}], the part of this rank's own {output.sharded}"


def _which(diagnosis: Diagnosis) -> str:
    sick = [f"{verdict.name}.grad" for verdict in diagnosis.sick]
    return f"but {enumerated(sick)} {'is' if len(sick) == 1 else 'are'} not"


# ---------------------------------------------------------------- what it cost


def _too_dear(case: Case, forward: list[dict], backward: list[dict], diagnosis: Diagnosis) -> Report | None:
    """A right answer that communicates more than the exercise's price; judged by the rank that communicates most."""
    price, phases = case.exercise.price, ("forward", "backward")
    per_rank = [
        [
            Sent(phase, row.operation, row.size, str(row.line or ""))
            for phase, found in zip(phases, both)
            for row in found["traffic"]
        ]
        for both in zip(forward, backward)
    ]

    def dear(sent: list[Sent]) -> list[str]:
        return [phase for phase in phases if not _within(price.of(phase), _in(phase, sent), case.sizes)]

    sent = max(per_rank, key=lambda sent: (len(dear(sent)), len(sent), sum(one.bytes for one in sent)))
    if not dear(sent):
        return None
    said = [_compared(phase, price.of(phase), _in(phase, sent), case.sizes) for phase in dear(sent)]
    unused = [phase for phase in phases if price.of(phase) and not _in(phase, sent)]
    also = "".join(f", with one of {_bytes(price.of(phase), case.sizes)} in {phase}" for phase in unused)
    return Report(
        False,
        f"output and gradients are right, but more is sent than it takes: {'; '.join(said)}{also}",
        ("when", "operation", "bytes", "called from"),
        tuple(Row(one.phase not in dear(sent), (one.phase, one.operation, str(one.bytes), one.line)) for one in sent),
        hint=case.exercise.hint(Evidence("price", diagnosis, tuple(sent))),
    )


def _in(phase: str, sent: Sequence[Sent]) -> list[Sent]:
    return [one for one in sent if one.phase == phase]


def _within(enough: AllReduce | None, sent: list[Sent], sizes: Sizes) -> bool:
    if not sent:
        return True
    return bool(enough) and [s.operation for s in sent] == ["all_reduce"] and sent[0].bytes <= enough.bytes(sizes)


def _compared(phase: str, enough: AllReduce | None, sent: list[Sent], sizes: Sizes) -> str:
    """`in backward 2 all-reduces of 280 bytes, where one of 240 bytes (2 · batch · hidden numbers) is enough`"""
    operations = [one.operation for one in sent]
    names = [_counted(operations.count(operation), operation) for operation in dict.fromkeys(operations)]
    in_all = " in all" if len(sent) > 1 else ""
    there = f"in {phase} {enumerated(names)} of {sum(one.bytes for one in sent)} bytes{in_all}"
    if enough is None:
        return f"{there}, where nothing has to be sent"
    one = "one" if set(operations) == {"all_reduce"} else "one all-reduce"
    return f"{there}, where {one} of {_bytes(enough, sizes)} is enough"


def _bytes(enough: AllReduce, sizes: Sizes) -> str:
    return f"{enough.bytes(sizes)} bytes ({enough.formula} numbers)"


def _counted(times: int, operation: str) -> str:
    name = operation.replace("_", "-")
    return f"{times} {name}s" if times > 1 else f"one {name}"
