"""Links one can choose: live ranks whose communication takes the time that a chosen α and β would.

    launch(fn, world_size=8, links=Node(4, inside=NVLINK, between=INFINIBAND).slower(10_000))

Every rank runs real collectives on real data; only, an operation is not done before its cost on the chosen links has
passed. So "tensor parallelism stays inside the node", overlap with compute and the price of one slow link can be felt
on a laptop, and measured: the times are those of the α-β model (`course_utils.collectives`), to a few per cent.

`values` has the links themselves (no torch), `live` the process group that keeps the time.
"""

from .values import INFINIBAND, NVLINK, PCIE, Link, Node

__all__ = ["INFINIBAND", "NVLINK", "PCIE", "Link", "Node"]
