"""`diagnose_twin`: runs a computation on one process and its sharded twin on live ranks, and diagnoses every gradient.

Both sides get the same inputs and the same loss. The loss is computed on **every** rank, from the whole output, as in
training code; that is what makes a careless backward come out as world_size times the gradient. By default it is a sum
with fixed random weights, so that mistakes that a plain sum forgives (a permutation, a transposition) show.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import Tensor, nn

from course_utils.gradients.doctor import diagnose
from course_utils.gradients.values import Diagnosis

Inputs = Mapping[str, Any] | tuple | list | Tensor


def diagnose_twin(
    reference: Callable[..., Tensor] | nn.Module,
    sharded: Callable[..., Any] | nn.Module,
    inputs: Inputs,
    *,
    world_size: int = 2,
    loss: Callable[[Tensor], Tensor] | None = None,
    rtol: float | None = None,
    atol: float = 0.0,
    device: str = "auto",
    timeout: float | None = 60,
) -> Diagnosis:
    """Runs both twins forward and backward and says how each rank's gradients relate to the reference.

    Two functions: both are called with the inputs, and the gradients of all floating-point inputs are compared under
    their names. Two modules: `sharded` is called on each rank with a copy of the reference module and returns its
    sharded twin (which has the same parameter names; DDP, FSDP2 and `parallelize_module` will do); both are called with
    the inputs, and the gradients of the parameters (tied ones once) and of the inputs (`input:0`, `input:x`) are
    compared. A DTensor is judged by what its rank holds. Neither twin, nor any input, is changed.

    Args:
        reference: a function or module; runs here, in this process.
        sharded: its twin; runs on each of the live ranks, where `torch.distributed` is initialised.
        inputs: keyword arguments by name, or positional ones in a tuple, or a single tensor. Floating-point tensors are
            differentiated; token ids, numbers and the like are handed on. Every rank gets the whole of them.
        world_size: the number of ranks.
        loss: output -> scalar, the same on all ranks; by default a sum with fixed random weights.
        rtol, atol: as for `diagnose`.
        device, timeout: as for `launch`.

    Returns:
        A `Diagnosis` whose `forward` is the verdict on the output (its `errors` are the largest error per rank).

    Raises:
        TypeError: a twin does not return one tensor (or, for modules, `sharded` no module).
        ValueError: the reference's output depends on nothing differentiable; or `diagnose` raises.
        RankError, RankTimeout: a rank failed or hung (see `course_utils.world`).

    >>> import torch.distributed as dist
    >>> def linear(x, w):
    ...     return x @ w.T
    >>> def forgetful(x, w):  # computes its rows only; gathers, but nobody hands the gradients round
    ...     part = x @ w.chunk(2)[dist.get_rank()].T
    ...     parts = [torch.empty_like(part) for _ in range(2)]
    ...     dist.all_gather(parts, part.detach())
    ...     parts[dist.get_rank()] = part
    ...     return torch.cat(parts, 1)
    >>> diagnosis = diagnose_twin(linear, forgetful, {"x": torch.randn(3, 5), "w": torch.randn(4, 5)}, world_size=2)
    >>> diagnosis.forward.words, diagnosis["x"].words, diagnosis["w"].words
    ('matches', 'partial', 'own slice only, dim 0')
    """
    from course_utils.world import launch

    of_modules = isinstance(reference, nn.Module)
    model = _fresh(reference) if of_modules else reference
    output, gradients = _run(model, inputs, loss, None, "the reference")
    if not any(gradient is not None for gradient in gradients.values()):
        raise ValueError(
            "no gradient reaches any input or parameter of the reference: its output must depend on at least one "
            "floating-point tensor that requires grad"
        )
    whole = model if of_modules else None
    if whole is not None:
        whole.zero_grad(set_to_none=True)  # travels to the ranks without its gradients
    results = launch(
        _on_rank, whole, sharded, inputs, loss, output.shape, world_size=world_size, device=device, timeout=timeout
    )
    outputs, per_rank = [output for output, _ in results], [held for _, held in results]
    _refuse_untied(model, gradients, per_rank)
    forward = diagnose({"forward": output}, [{"forward": one} for one in outputs], rtol=rtol, atol=atol)
    verdicts = diagnose(gradients, per_rank, rtol=rtol, atol=atol).verdicts
    return Diagnosis(verdicts, world_size=len(per_rank), forward=forward["forward"])


def weighted_sum(output: Tensor) -> Tensor:
    """The default loss: a sum of all elements with weights drawn from a fixed normal sequence; output of any shape.

    >>> weighted_sum(torch.zeros(2, 3)).item()
    0.0
    """
    generator = torch.Generator(device="cpu").manual_seed(20)
    weights = torch.randn(output.shape, generator=generator, dtype=torch.float64, device="cpu")
    exact = torch.promote_types(output.dtype, torch.float32)  # a sum of halves would round more than the model does
    return (weights.to(output.device, exact) * output.to(exact)).sum()


def _on_rank(
    whole: nn.Module | None, sharded: Callable, inputs: Inputs, loss: Callable | None, shape: torch.Size
) -> tuple[Tensor, dict[str, Tensor | None]]:
    """What each live rank runs: the sharded twin's output and gradients."""
    model = sharded
    if whole is not None:
        device = torch.get_default_device()
        model = _fresh(sharded).to(device) if isinstance(sharded, nn.Module) else sharded(whole.to(device))
        if not isinstance(model, nn.Module):
            raise TypeError(
                f"sharded returned a {type(model).__name__}, expected the sharded module: beside a reference module, "
                "it is a function from (a copy of) that module to its twin"
            )
    return _run(model, inputs, loss, shape, "the sharded twin")


def _run(
    model: Callable, inputs: Inputs, loss: Callable | None, shape: torch.Size | None, who: str
) -> tuple[Tensor, dict[str, Tensor | None]]:
    """Forward, loss and backward; the output and the gradients by name. `shape`: of the reference's output."""
    device = None if shape is None else torch.get_default_device()
    positional, named = _arguments(inputs)
    positional = [_leaf(value, device) for value in positional]
    named = {name: _leaf(value, device) for name, value in named.items()}
    output = model(*positional, **named)
    if not isinstance(output, Tensor):
        raise TypeError(
            f"{who} returned a {type(output).__name__}, expected one tensor: wrap it in a function that does"
        )
    if hasattr(output, "full_tensor"):
        output = output.full_tensor()
    if loss is None and shape is not None and output.shape != shape:
        raise ValueError(
            f"{who} returned shape {tuple(output.shape)}, expected the reference's {tuple(shape)}: gather the output, "
            "or pass a loss that can do without"
        )
    value = (loss or weighted_sum)(output)
    if value.requires_grad:  # if not, a collective cut the graph: all gradients stay None, and that is the diagnosis
        value.backward()

    of_module = isinstance(model, nn.Module)
    leaves = dict(model.named_parameters()) if of_module else {}
    if isinstance(model, nn.parallel.DistributedDataParallel):
        leaves = {name.removeprefix("module."): parameter for name, parameter in leaves.items()}
    leaves |= {f"input:{index}": value for index, value in enumerate(positional)}
    leaves |= {f"input:{name}" if of_module else name: value for name, value in named.items()}
    gradients = {
        name: _held(leaf.grad)
        for name, leaf in leaves.items()
        if isinstance(leaf, nn.Parameter) or (isinstance(leaf, Tensor) and leaf.requires_grad)
    }
    return output.detach().cpu(), gradients


def _arguments(inputs: Inputs) -> tuple[list, dict[str, Any]]:
    if isinstance(inputs, Tensor):
        return [inputs], {}
    if isinstance(inputs, Mapping):
        return [], dict(inputs)
    if isinstance(inputs, (tuple, list)):
        return list(inputs), {}
    raise TypeError(
        f"inputs is a {type(inputs).__name__}, expected a mapping from argument names to values, a tuple, or one tensor"
    )


def _leaf(value: Any, device: torch.device | None) -> Any:
    """A copy that collects a gradient, of a floating-point tensor; anything else as it is."""
    if not isinstance(value, Tensor):
        return value
    value = value.detach().to(device or value.device).clone()
    return value.requires_grad_() if value.is_floating_point() else value


def _held(gradient: Tensor | None) -> Tensor | None:
    """What this rank holds of a gradient, on the CPU."""
    if gradient is None:
        return None
    return (gradient.to_local() if hasattr(gradient, "to_local") else gradient).detach().cpu()


def _fresh(module: nn.Module) -> nn.Module:
    module = copy.deepcopy(module)
    module.zero_grad(set_to_none=True)
    return module


def _refuse_untied(model: Callable, gradients: dict[str, Tensor | None], per_rank: list[dict]) -> None:
    if not isinstance(model, nn.Module):
        return
    parameters = dict(model.named_parameters(remove_duplicate=False))
    for rank, held in enumerate(per_rank):
        for name in set(held) - set(gradients):
            if name in parameters:
                twin = next(one for one in gradients if parameters.get(one) is parameters[name])
                raise ValueError(
                    f"rank {rank} has the parameter {name!r} separately, which the reference ties to {twin!r}: tie "
                    "them in the sharded twin too"
                )
