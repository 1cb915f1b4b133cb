"""`examine` produces the report on a function: live ranks against its twin on a single process; `check` shows it.

What is looked at, in this order: does the call make sense; does the function run, and return what was asked for; is the
result right; are the gradients right, in the doctor's words; what did it communicate. The first thing that is wrong is
the answer, at the first number of ranks at which it is wrong.
"""

from __future__ import annotations

import difflib
import inspect
import sys
from collections.abc import Callable, Sequence

import torch

from course_utils.gradients import Diagnosis, diagnose
from course_utils.grading import probe, sharded_autograd
from course_utils.grading.exercises import Case, Evidence, Exercise, Input
from course_utils.grading.reports import Report, Row
from course_utils.world import RankError, RankTimeout, World
from course_utils.world.report import ranks_text

EXERCISES = {exercise.name: exercise for exercise in sharded_autograd.EXERCISES}


class CheckFailed(AssertionError):
    """A check that did not pass; `report` says why, and so does the text."""

    def __init__(self, report: Report, shown: bool = False):
        super().__init__(str(report))
        self.report = report
        self.shown = shown  # in the notebook, above the error

    def _render_traceback_(self):  # what a notebook shows: the answer, not the way through this package
        return [f"{type(self).__name__}: not right yet; see above"] if self.shown else str(self).splitlines()


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
    complaint = _refuse(name, fn)
    if complaint:
        return complaint
    exercise = EXERCISES[name]
    for done, world_size in enumerate(world_sizes):
        wrong = _on(exercise, fn, world_size, seed, timeout)
        if wrong:
            right_on = f"; on {_enumerate(world_sizes[:done])} ranks all is right" if done else ""
            return Report(False, f"{name} on {world_size} ranks: {wrong.headline}{right_on}", *_rest(wrong))
    return Report(True, f"{name} is right on {_enumerate(world_sizes)} ranks: {_praise(exercise)}")


def _rest(report: Report) -> tuple:
    return report.columns, report.rows, report.detail, report.hint


def _enumerate(things, last: str = "and") -> str:
    *most, final = map(str, things)
    return f"{', '.join(most)} {last} {final}" if most else final


def _praise(exercise: Exercise) -> str:
    gradients = _enumerate(f"{i.name}.grad" for i in exercise.inputs)
    if exercise.price is None:
        return f"the output, and {gradients}"
    return f"the output, {gradients}, with no more communication than it takes"


# ---------------------------------------------------------------- does the call make sense?


def _refuse(name, fn) -> Report | None:
    names = _enumerate(map(repr, EXERCISES))
    if not isinstance(name, str):
        return Report(False, f"check needs the exercise's name first and then your function; the names are {names}")
    if name not in EXERCISES:
        near = difflib.get_close_matches(name, EXERCISES, 1, 0.6)
        guess = f": did you mean {near[0]!r}?" if near else "."
        return Report(False, f"there is no exercise named {name!r}{guess} The names are {names}")
    exercise = EXERCISES[name]
    call = ", ".join(i.name for i in exercise.inputs)
    if not callable(fn):
        what = f"the text {fn!r:.40}" if isinstance(fn, str) else f"of type {type(fn).__name__}"
        return Report(
            False,
            f"the second argument is {what}, not a function: pass the function itself, without calling it and without "
            f"quotation marks, as in check({name!r}, {name})",
        )
    try:
        inspect.signature(fn).bind(*exercise.inputs)
    except TypeError as error:
        theirs = getattr(fn, "__name__", name) + str(inspect.signature(fn))
        return Report(False, f"{name} is called as {name}({call}), and yours is {theirs}: {error}")
    except ValueError:  # a function without a readable signature
        pass
    return None


# ---------------------------------------------------------------- one number of ranks


def _on(exercise: Exercise, fn, world_size: int, seed: int, timeout: float) -> Report | None:
    """What is wrong on so many ranks, if anything. The second case meets what the first has left behind."""
    try:
        with World(world_size, timeout=timeout) as world:
            for number in range(2):
                wrong = _on_case(Case(exercise, world_size, seed + number), fn, world)
                if wrong:
                    again = ", with other inputs than in the call before" if number else ""
                    return Report(False, wrong.headline + again, *_rest(wrong))
    except RankError as error:
        return _failed(error, timeout)
    except TypeError as error:  # a function that can't be sent to the ranks
        return Report(False, str(error))
    return None


def _failed(error: RankError, timeout: float) -> Report:
    text = str(error)
    if isinstance(error, RankTimeout):
        if "still running" in text:
            return Report(False, f"no result after {timeout:g} s", detail=text)
        return Report(
            False,
            "the ranks hang",
            detail=text,
            hint="every rank must call the same collectives in the same order, in forward and in backward",
        )
    first, *more = text.splitlines()
    if error.error_type == "NotImplementedError":
        said = first.partition("NotImplementedError: ")[2]
        return Report(False, "not written yet" + (f" ({said})" if said else ""), detail="\n".join(more), hint=_START)
    return Report(False, first, detail="\n".join(more))


_START = "begin with the single-process specification, and change only what a rank can't know from its own inputs"


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
            *_table(of_output, ("output",)),
            hint=exercise.hint(Evidence("forward", of_output)),
        )

    backward = world.run(probe.backward)
    of_gradients = diagnose(gradients, [found["gradients"] for found in backward])
    if not of_gradients:
        return Report(
            False,
            f"the result is right, {_which(of_gradients)}",
            *_table(of_gradients, [f"{v.name}.grad" for v in of_gradients]),
            hint=exercise.hint(Evidence("backward", of_gradients)),
        )
    if any(found["lucky"] for found in backward):
        return Report(False, "the gradients are right by luck", hint=_LUCK)
    if exercise.price is not None:
        return _too_dear(case, forward, backward, of_gradients)
    return None


_LUCK = (
    "dist.all_reduce has no backward, and you call it on a tensor that autograd follows: torch hands the gradient on "
    "as if nothing had happened, and warns that it will stop doing so; call it inside an autograd function, which says "
    "what flows back"
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
    if "shape" not in found:
        return f"it returned a {found['type']}", f", expected a tensor of shape {expected}: {_in_words(output)}"
    if found["shape"] != tuple(expected):
        return (
            f"it returned a tensor of shape {list(found['shape'])}",
            f", expected {expected}: {_in_words(output)}",
        )
    if found["dtype"] is not torch.float32:
        return f"it returned {str(found['dtype']).removeprefix('torch.')}", ", expected float32 like the inputs"
    if not found["grows"]:
        return (
            "the result is cut off from the inputs",
            ", so no gradient can flow back: look for detach(), no_grad(), .data, or a collective that has no backward",
        )
    return None


def _in_words(output: Input) -> str:
    if output.sharded is None:
        return f"[{', '.join(output.shape)}], whole on every rank"
    shape = ", ".join(f"{d} / world_size" if d == output.sharded else d for d in output.shape)
    return f"[{shape}], the part of this rank's own {output.sharded}"


def _which(diagnosis: Diagnosis) -> str:
    sick = [f"{verdict.name}.grad" for verdict in diagnosis.sick]
    return f"but {_enumerate(sick)} {'is' if len(sick) == 1 else 'are'} not"


def _table(diagnosis: Diagnosis, names) -> tuple:
    rows = []
    for name, verdict in zip(names, diagnosis, strict=True):
        everyone = len(verdict.ranks) == diagnosis.world_size
        where = "all" if everyone else ", ".join(map(str, verdict.ranks))
        error = "" if verdict.error is None or verdict.healthy else f"{verdict.error:.2g}"
        rows.append(Row(verdict.healthy, (name, verdict.words, where, error)))
    return ("", "what it is", "wrong on ranks", "largest error"), tuple(rows)


# ---------------------------------------------------------------- what it cost


def _too_dear(case: Case, forward: list[dict], backward: list[dict], diagnosis: Diagnosis) -> Report | None:
    """A right answer that communicates more than the exercise's price; judged by the rank that communicates most."""
    price = case.exercise.price
    per_rank = [
        [("forward", row) for row in there["traffic"]] + [("backward", row) for row in back["traffic"]]
        for there, back in zip(forward, backward, strict=True)
    ]
    rows = max(per_rank, key=lambda rows: (len(rows), sum(row.size for _, row in rows)))
    counted = tuple((phase, row.operation) for phase, row in rows)
    most = 4 * price.numbers(case.sizes)
    total = sum(row.size for _, row in rows)
    if set(counted) <= {("backward", "all_reduce")} and len(counted) <= 1 and total <= most:
        return None
    shown = tuple(Row(False, (phase, row.operation, str(row.size), str(row.line or ""))) for phase, row in rows)
    return Report(
        False,
        f"output and gradients are right, but with {_collectives(counted)} ({total} bytes), where one all-reduce in "
        f"backward is enough ({most} bytes: {price.formula})",
        ("when", "collective", "bytes", "called from"),
        shown,
        hint=case.exercise.hint(Evidence("price", diagnosis, counted)),
    )


def _collectives(counted) -> str:
    """`2 all-reduces in backward`"""
    parts = []
    for phase, operation in dict.fromkeys(counted):
        times = counted.count((phase, operation))
        name = operation.replace("_", "-") + ("s" if times > 1 else "")
        parts.append(f"{times if times > 1 else 'one'} {name} in {phase}")
    return _enumerate(parts)
