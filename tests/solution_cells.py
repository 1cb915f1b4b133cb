"""What the tests of exercises share: running the cells of a solution, and the report on an answer that is refused."""

import json
from collections.abc import Callable
from pathlib import Path

import pytest

from course_utils.grading import CheckFailed, Report, check

SOLUTIONS = Path(__file__).resolve().parent.parent / "solutions"


def run_solution(topic: str, graded: bool = False) -> dict:
    """What the cells of a solution define; `graded` runs the cells that are graded too, hidden tests included."""
    cells = json.loads((SOLUTIONS / topic / f"{topic}.ipynb").read_text(encoding="utf-8"))["cells"]
    names: dict = {"__name__": "solution"}
    for cell in cells:
        if cell["cell_type"] == "code" and (graded or not cell["metadata"].get("nbgrader", {}).get("grade")):
            exec("".join(cell["source"]), names)
    return names


def refused(name: str, fn: Callable, **options) -> Report:
    """The report on a function that must not pass; it begins with the name of the exercise."""
    with pytest.raises(CheckFailed) as caught:
        check(name, fn, **options)
    report = caught.value.report
    assert not report.passed and report.headline.startswith(name)
    return report
