"""`diagnose`: reads gradients in whatever form they come, refuses what can't be compared, and judges tensor by tensor.

The relations themselves are in `relations`, what counts as equal in `tolerance`, the advice in `cures`.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence

import torch
from torch import Tensor, nn

from course_utils.gradients.cures import cure
from course_utils.gradients.relations import Case, Finding, layout, relate
from course_utils.gradients.tolerance import Target, target, tolerance_for
from course_utils.gradients.values import Diagnosis, Disease, Verdict

Gradients = Mapping[str, Tensor | None] | nn.Module


def diagnose(
    reference: Gradients,
    per_rank: Sequence[Gradients],
    *,
    previous: Gradients | None = None,
    elsewhere: bool = False,
    rtol: float | None = None,
    atol: float = 0.0,
) -> Diagnosis:
    """Says for each gradient in which way the ranks' values relate to the single-process reference.

    A pure function on tensors: it starts nothing and needs no process group. Where it is healthy, every element on
    every rank was compared and lies within the tolerance of `course_utils.gradients.tolerance`.

    Args:
        reference: name -> gradient of any shape, or None where it has none (frozen, unused); or a module, whose
            `.grad`s are read, tied parameters once.
        per_rank: the same for each rank, in rank order. A tensor has the reference's shape, or the shape of a shard
            along one dimension; shards may be uneven or empty. A missing name is a missing gradient.
        previous: the reference's gradients of the step before; then stale and accumulated gradients are recognised.
        elsewhere: a name that a rank's mapping lacks lives on another rank (pipeline stages, experts), and is judged on
            the ranks that have it.
        rtol: relative tolerance, at least 0 and below 0.1; by default `RTOL` of the coarsest dtype involved.
        atol: absolute tolerance per element, in units of the gradient.

    Returns:
        A `Diagnosis` with one `Verdict` per name, in the reference's order. "Scaled" and "partial" are claims about the
        numbers; where they would hold by accident (zero reference, a single number) the weaker claim is made.

    Raises:
        TypeError: something is not a mapping, a list, or a tensor of real floating-point numbers; or is a DTensor.
        ValueError: there is nothing to compare, the reference isn't finite, or a rank has a name the reference lacks.

    >>> whole = {"weight": torch.tensor([[1.0, 2.0], [3.0, 4.0]]), "bias": torch.tensor([6.0, -2.0])}
    >>> rank0 = {"weight": whole["weight"][:1], "bias": torch.tensor([1.0, 1.0])}
    >>> rank1 = {"weight": whole["weight"][1:], "bias": torch.tensor([5.0, -3.0])}
    >>> diagnosis = diagnose(whole, [rank0, rank1])
    >>> diagnosis["weight"].words, diagnosis["bias"].words, diagnosis.healthy
    ('right shard, dim 0', 'partial', False)
    """
    if rtol is not None and not 0 <= rtol < 0.1:
        raise ValueError(f"rtol={rtol} must be at least 0 and below 0.1: with more, a missing gradient would pass")
    if not 0 <= atol < math.inf:
        raise ValueError(f"atol={atol} must be a number of at least 0, in the units of the gradient")
    if isinstance(per_rank, (Mapping, nn.Module, str, Tensor)) or not isinstance(per_rank, Sequence):
        raise TypeError(
            f"per_rank is a {type(per_rank).__name__}, expected a list with one mapping of gradients per rank: "
            "for a single rank write [gradients]"
        )
    if not per_rank:
        raise ValueError("per_rank is empty: give the gradients of at least one rank")
    whole = _read(reference, "reference")
    held = [_read(gradients, f"rank {rank}") for rank, gradients in enumerate(per_rank)]
    before = {} if previous is None else _read(previous, "previous")
    _refuse_uncomparable(reference, whole, held, before)

    loudest = max(_largest(one) for one in whole.values() if one is not None)
    verdicts = []
    for name, value in whole.items():
        ranks = [rank for rank, one in enumerate(held) if name in one] if elsewhere else []
        ranks = ranks or list(range(len(held)))
        verdicts.append(
            _judge(name, value, [one.get(name) for one in held], ranks, before.get(name), loudest, rtol, atol)
        )
    return Diagnosis(tuple(verdicts), len(held))


def _read(gradients: Gradients, whose: str) -> dict[str, Tensor | None]:
    """name -> dense tensor on the CPU in its own dtype, or None."""
    if isinstance(gradients, nn.Module):
        gradients = {name: parameter.grad for name, parameter in gradients.named_parameters()}
    if not isinstance(gradients, Mapping):
        raise TypeError(
            f"the gradients of the {whose} are a {type(gradients).__name__}, expected a mapping from names to tensors: "
            "e.g. {name: p.grad for name, p in model.named_parameters()}"
        )
    return {name: None if value is None else _dense(name, value, whose) for name, value in gradients.items()}


def _dense(name: str, value: Tensor, whose: str) -> Tensor:
    if not isinstance(name, str):
        raise TypeError(f"the {whose} has the name {name!r}, expected a string: names pair the gradients of the ranks")
    if not isinstance(value, Tensor):
        raise TypeError(f"{name!r} of the {whose} is a {type(value).__name__}, expected a torch tensor or None")
    if hasattr(value, "full_tensor"):
        raise TypeError(
            f"{name!r} of the {whose} is a DTensor: pass its .to_local() (this rank's shard) or its .full_tensor()"
        )
    if value.is_meta:
        raise ValueError(f"{name!r} of the {whose} is on the meta device and has no values: compute it on a real one")
    if value.is_complex():
        raise TypeError(
            f"{name!r} of the {whose} is {value.dtype}, expected real numbers: pass torch.view_as_real(gradient)"
        )
    if not value.is_floating_point():
        raise TypeError(
            f"{name!r} of the {whose} is {value.dtype}, expected floating-point: gradients are not integers"
        )
    value = value.detach()
    return (value if value.layout is torch.strided else value.to_dense()).cpu()


def _refuse_uncomparable(
    reference: Gradients, whole: dict[str, Tensor | None], held: list[dict[str, Tensor | None]], before: dict
) -> None:
    if all(value is None for value in whole.values()):
        what = "is empty" if not whole else "has None for every name"
        raise ValueError(f"the reference {what}, so there is nothing to compare: call backward() on it first")
    for whose, gradients in (("reference", whole), ("previous", before)):
        for name, value in gradients.items():
            if value is not None and not value.isfinite().all():
                raise ValueError(
                    f"{name!r} of the {whose} has NaN or infinity in it, and nothing can be compared with that: "
                    "cure the single-process run first"
                )
    for name, value in before.items():
        now = whole.get(name)
        if value is not None and now is not None and value.shape != now.shape:
            raise ValueError(
                f"{name!r} of the previous step has shape {tuple(value.shape)}, expected the reference's "
                f"{tuple(now.shape)}: give the single-process gradients of the step before"
            )
    for rank, gradients in enumerate(held):
        for name in gradients:
            if name not in whole:
                hint = _hint(name, reference, whole)
                raise ValueError(f"rank {rank} has a gradient named {name!r} that the reference lacks: {hint}")


def _hint(name: str, reference: Gradients, whole: dict[str, Tensor | None]) -> str:
    if isinstance(reference, nn.Module):
        parameters = dict(reference.named_parameters(remove_duplicate=False))
        if name in parameters:
            twin = next(other for other in whole if parameters[other] is parameters[name])
            return f"there it is tied to {twin!r}, so tie them on the ranks too"
    for other in whole:
        if name.endswith("." + other):
            return f"it has {other!r}, so take the names of the wrapped model (`.module`) on the ranks"
    names = ", ".join(map(repr, list(whole)[:5])) + (", …" if len(whole) > 5 else "")
    return f"its names are {names}; give the reference the same names, with None where it has no gradient"


def _largest(x: Tensor) -> float:
    return float(x.abs().max()) if x.numel() else 0.0


def _judge(
    name: str,
    reference: Tensor | None,
    held: list[Tensor | None],
    ranks: list[int],
    previous: Tensor | None,
    loudest: float,
    rtol: float | None,
    atol: float,
) -> Verdict:
    """The verdict on one name; only `ranks` are expected to hold it."""
    world_size = len(held)
    present = {rank: held[rank] for rank in ranks if held[rank] is not None}
    if reference is None:
        finding, errors = _judge_without_reference(present, world_size)
    elif any(not value.isfinite().all() for value in present.values()):
        off = tuple(rank for rank, value in present.items() if not value.isfinite().all())
        finding, errors = Finding((Disease.NOT_FINITE,), off), (None,) * world_size
    else:
        finding, errors = _compare(reference, present, ranks, previous, world_size, loudest, rtol, atol)
    return Verdict(name, **vars(finding), errors=errors, cure=cure(finding, world_size))


def _judge_without_reference(present: dict[int, Tensor], world_size: int) -> tuple[Finding, tuple[float, ...]]:
    errors = tuple(_largest(present[rank]) if rank in present else 0.0 for rank in range(world_size))
    if not present:
        return Finding((Disease.MATCHES,), note="no gradient, as in the reference"), errors
    note = "" if any(errors) else "it is all zero"
    return Finding((Disease.UNEXPECTED,), tuple(present), note=note), errors


def _compare(
    reference: Tensor,
    present: dict[int, Tensor],
    ranks: list[int],
    previous: Tensor | None,
    world_size: int,
    loudest: float,
    rtol: float | None,
    atol: float,
) -> tuple[Finding, tuple[float | None, ...]]:
    shapes = [present[rank].shape if rank in present else None for rank in ranks]
    pieces = layout(reference.shape, shapes)
    dtypes = {reference.dtype, *(value.dtype for value in present.values())}
    if pieces is None:
        return _wrong_shape(reference.shape, present), (None,) * world_size
    unit = _largest(reference) or 1.0
    tolerance = tolerance_for(dtypes, rtol, atol / unit)
    place = {rank: index for index, rank in enumerate(ranks)}  # the layout counts only the ranks that take part
    whole = target(reference.double() / unit, tolerance)
    values = {place[rank]: value.double() / unit for rank, value in present.items()}
    expected = {rank: pieces.of(whole.value, place[rank]) for rank in ranks}
    errors = [0.0] * world_size
    for rank in ranks:
        off = values[place[rank]] - expected[rank] if rank in present else expected[rank]
        errors[rank] = _largest(off) * unit

    absent = tuple(rank for rank in ranks if rank not in present and expected[rank].numel())
    judged = {index: value for index, value in values.items() if value.numel()}
    before = None if previous is None else previous.double() / unit
    if judged:
        found = relate(Case(whole, judged, pieces, world_size, before))
        found = Finding(**{**vars(found), "ranks": tuple(ranks[index] for index in found.ranks)})
    else:
        found = Finding((Disease.MATCHES,) if pieces.dim is None else (Disease.RIGHT_SHARD,), dim=pieces.dim)
    if absent:
        return _with_missing(found, absent), tuple(errors)
    # Below eps times the model's largest gradient, a tensor may be nothing but rounding.
    small = max(_largest(value) for value in [whole.value, *values.values()]) * unit
    if _could_be_noise(found, whole) and small <= tolerance.eps * loudest:
        note = f'were it larger, the verdict would be "{found.diseases[0]}"'
        found = Finding((Disease.TOO_SMALL,), found.ranks, note=note)
    return found, tuple(errors)


def _with_missing(found: Finding, absent: tuple[int, ...]) -> Finding:
    if not found.ranks:
        return Finding((Disease.MISSING,), absent, dim=found.dim, note="it is None")
    others = tuple(disease for disease in found.diseases if disease is not Disease.MISSING)
    ranks = tuple(sorted({*absent, *found.ranks}))
    return Finding(**{**vars(found), "diseases": (Disease.MISSING, *others), "ranks": ranks})


def _could_be_noise(found: Finding, whole: Target) -> bool:
    """Whether rounding errors alone could look like this: they make no relation that holds for several numbers."""
    if found.diseases[0] in (Disease.MISSING, Disease.WRONG, Disease.RANKS_DISAGREE):
        return True
    return bool(found.ranks) and int(whole.value.count_nonzero()) < 2


def _wrong_shape(shape: torch.Size, present: dict[int, Tensor]) -> Finding:
    off = tuple(rank for rank, value in present.items() if value.shape != shape)
    given = ", ".join(f"rank {rank} {tuple(present[rank].shape)}" for rank in off[:4]) + (", …" if len(off) > 4 else "")
    return Finding((Disease.WRONG_SHAPE,), off, note=f"the reference has shape {tuple(shape)}, {given}")
