"""`check`: runs a learner's function on live ranks and answers as a good tutor would; `examine` returns the answer.

The value is a `Report`. Modules, from the outside in: `checks` (one call), `exercises` (what an exercise is: its
inputs, its specification, its price), `probe` (what runs on the ranks), `judged` (exercises that are judged in their
own way), `reports` (the value and its views), `wording` (the words and tables that reports share). The exercises:
`assumptions` and `held_bytes` of notebook 01; `all_reduces` of 02; `overlapped` (with `bucketed`) and `token_mean`
(with `token_weights`) of 03; `zero` (with `zero_steps`) and `clipping` of 04; `sharded_autograd` of 05.
"""

from .checks import CheckFailed, check, examine
from .reports import Report, Row

__all__ = ["CheckFailed", "Report", "Row", "check", "examine"]
