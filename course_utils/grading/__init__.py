"""`check`: runs a learner's function on live ranks and answers as a good tutor would; `examine` returns the answer.

The value is a `Report`. Modules, from the outside in: `checks` (one call), `exercises` (what an exercise is:
its inputs, its specification, its price), `sharded_autograd` (the exercises of notebook 05), `judged` (exercises that
are judged in their own way), `assumptions` and `held_bytes` (the exercises of notebook 01), `all_reduces` (those of
notebook 02), `probe` (what runs on the ranks), `reports` (the value and its views).
"""

from .checks import CheckFailed, check, examine
from .reports import Report, Row

__all__ = ["CheckFailed", "Report", "Row", "check", "examine"]
