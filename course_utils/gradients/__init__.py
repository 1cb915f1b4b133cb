"""The gradient doctor: which kind of wrong is this gradient?

The value is a `Diagnosis`: for each tensor, how every rank's gradient relates to the gradient of the same model on a
single process. The relations are those by which a tensor can be spread over ranks (replicated, partial sum, shard:
the placements of DTensor and GSPMD) and those by which sharded training code goes wrong without an error message.

    diagnose(reference, per_rank)                   pure: tensors in, Diagnosis out; no process group needed
    diagnose_twin(reference, sharded, inputs, …)    runs both, on one process and on live ranks, and diagnoses

Source of the relations: Xu et al., "GSPMD" (2021), section 3.1, and the `Shard`, `Replicate` and `Partial` placements
of `torch.distributed.tensor`. The diseases are what is left when one of the collectives between them is forgotten.
"""

from course_utils.gradients.doctor import diagnose
from course_utils.gradients.tolerance import RTOL
from course_utils.gradients.twin import diagnose_twin
from course_utils.gradients.values import Diagnosis, Disease, Verdict

__all__ = ["RTOL", "Diagnosis", "Disease", "Verdict", "diagnose", "diagnose_twin"]
