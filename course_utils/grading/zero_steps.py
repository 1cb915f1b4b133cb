"""Some steps of training with a learner's ZeRO-2: on live ranks, and as a single process takes them.

What a rank holds is seen through Python's garbage collector: the memory of every tensor that is alive. Numbers that
are kept elsewhere, in NumPy arrays of their own say, are not seen.
"""

from __future__ import annotations

import contextlib
import gc
import math
import random
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass

import numpy as np
import torch
import torch.distributed as dist
from torch import Tensor, nn

from course_utils.grading.judged import drawn
from course_utils.grading.wording import enumerated
from course_utils.links.live import BACKEND
from course_utils.timeline import recording
from course_utils.traffic import count

STEPS = 4
LR, EPS = 0.05, 1e-3  # with the usual 1e-8 Adam hides a gradient that is N times too large
FLOAT, BATCH = 4, 3  # bytes; sequences in the batch of one rank
OPERATIONS = ("all_reduce", "all_gather", "all_to_all", "reduce_scatter", "reduce", "broadcast", "gather", "scatter")
OPERATIONS += ("barrier", "send")
FROZEN, TIED = "positions", "embedding"


def bytes_of(tensors: Sequence[Tensor]) -> int:
    """Of all elements together; a storage that two of them share counts twice."""
    return sum(tensor.numel() * tensor.element_size() for tensor in tensors)


@dataclass(frozen=True)
class Sizes:
    """Of the network that the ranks train.

    Attributes:
        vocabulary: rows of the embedding, and of the output that is tied to it.
        hidden: width of everything: the embedding is [vocabulary, hidden], a layer's weight [hidden, hidden].
        layers: residual layers, of one weight each; all share one bias.
        sequence: tokens that are predicted, and rows of `positions`; a batch is [BATCH, sequence + 1].
    """

    vocabulary: int
    hidden: int
    layers: int
    sequence: int


def sizes_of(world_size: int, seed: int) -> Sizes:
    """Sizes by which few parameters divide by the number of ranks, and none is more than a tenth of them all.

    >>> sizes_of(4, 0)
    Sizes(vocabulary=12, hidden=11, layers=14, sequence=5)
    """
    draw = random.Random(f"ZeRO2 {world_size} {seed}")
    return Sizes(draw.choice((12, 14, 15)), draw.choice((11, 13)), draw.randint(13, 14), draw.randint(4, 6))


class Network(nn.Module):
    """Residual layers between an embedding and an output that share their weight; `positions` is frozen."""

    def __init__(self, sizes: Sizes, seed: int):
        super().__init__()
        hidden = sizes.hidden
        self.embedding = nn.Parameter(drawn(f"embedding {seed}", sizes.vocabulary, hidden) / 2)
        self.positions = nn.Parameter(drawn(f"positions {seed}", sizes.sequence, hidden) / 2, requires_grad=False)
        self.gain = nn.Parameter(torch.ones(1, device="cpu"))
        weights = [drawn(f"layer {i} {seed}", hidden, hidden) / math.sqrt(hidden) for i in range(sizes.layers)]
        self.layers = nn.ParameterList(weights)
        self.bias = nn.Parameter(torch.zeros(hidden, device="cpu"))
        self.output = self.embedding  # tied: one parameter with two names

    def forward(self, tokens: Tensor) -> Tensor:
        """[sequences, positions + 1] -> the mean loss of predicting each next token."""
        x = self.embedding[tokens[:, :-1]] + self.positions
        for weight in self.layers:
            x = x + torch.tanh(x @ weight.T + self.bias) / 2
        logits = self.gain * x @ self.output.T
        return nn.functional.cross_entropy(logits.flatten(0, 1), tokens[:, 1:].flatten())


def _batch(sizes: Sizes, seed: int, rank: int, step: int) -> Tensor:
    generator = torch.Generator().manual_seed(random.Random(f"batch {seed} {rank} {step}").getrandbits(63))
    shape = (BATCH, sizes.sequence + 1)
    return torch.randint(sizes.vocabulary, shape, generator=generator, device="cpu")


@dataclass(frozen=True)
class Enough:
    """What is enough on so many ranks, in bytes.

    Attributes:
        share: of one rank, Ψ/N and a largest parameter, so that whole parameters can have owners.
        between: what a rank holds after a step besides the model: three shares, and step counters.
        during: gradients at a time: a share, and two largest parameters that are not reduced yet.
        sent: by all ranks together in a step, with padding of less than N elements for every parameter, both ways.
    """

    share: float
    between: float
    during: float
    sent: int

    @classmethod
    def on(cls, trained: Sequence[Tensor], ranks: int) -> Enough:
        largest, psi = FLOAT * max(p.numel() for p in trained), bytes_of(trained)
        share = psi / ranks + largest
        sent = 2 * (ranks - 1) * (psi + FLOAT * (ranks - 1) * len(trained))
        return cls(share, 3 * share + 4 * FLOAT * len(trained), share + 2 * largest, sent)


# ---------------------------------------------------------------- on a rank


def _alive(network: nn.Module) -> dict[int, tuple[torch.UntypedStorage, tuple[int, ...]]]:
    """By its address the memory of every tensor that is alive and younger than the case, with a shape that it has.

    Tensors only: what is kept in NumPy arrays of their own is not seen.
    """
    tensors = [one for one in gc.get_objects() if issubclass(type(one), Tensor) and not hasattr(one, "full_tensor")]
    tensors += [*network.parameters(), *network.buffers()]
    tensors += [one.grad for one in tensors if one.is_leaf and one.grad is not None]
    found = {one.untyped_storage().data_ptr(): (one.untyped_storage(), tuple(one.shape)) for one in tensors}
    return {address: one for address, one in found.items() if one[0].nbytes()}


def train(fn: Callable, sizes: Sizes, seed: int, counted: bool) -> dict:
    """Runs on a rank: some steps with the optimizer that `fn` makes.

    While torch's dispatcher is listened to, Python sees every tensor of backward: so either what is sent is `counted`,
    in every step, or what is held is looked at, in every step.

    Returns:
        Plain values, for a tensor would count as held. What `fn` has made is of "type"; without a step() that is all.
        "start" has the parameters as the constructor leaves them (see `copies`), and "steps" a dict for each step:

        - "parameters": after it, see `copies`; "left": the names of those that still have a .grad;
        - where it is counted, "traffic": a `Traffic`, and "arrived": the operations that had been waited for when
          step() returned, on emulated links (None on others);
        - where it isn't, "during" and "between": the most bytes of gradients in backward, and the bytes besides the
          model after the step; "during_shapes" and "between_shapes": of the tensors that these are, the largest first.

        Where parameters are no longer plain float32 tensors of the old shapes, the training ends; if it isn't the
        shapes, "odd" says what they are.
    """
    network = Network(sizes, seed)
    batches = [_batch(sizes, seed, dist.get_rank(), step) for step in range(STEPS)]
    gc.collect()
    gc.freeze()  # what is there already is no longer listed
    optimizer = fn(network, LR, EPS)
    found: dict = {"type": type(optimizer).__name__}
    if not callable(getattr(optimizer, "step", None)):
        return found
    found |= {"odd": _odd(network), "steps": []}
    if found["odd"]:
        return found
    found["start"] = copies(network)
    step = _counted if counted else _looked_at(network)
    for tokens in batches:
        measured = step(network, optimizer, tokens)
        found["odd"] = _odd(network)
        if found["odd"]:
            break
        left = [name for name, parameter in network.named_parameters() if parameter.grad is not None]
        found["steps"].append({"parameters": copies(network), "left": left, **measured})
        if _cut(found):
            break
    return found


def _counted(network: nn.Module, optimizer, tokens: Tensor) -> dict:
    """A step in which is counted what is sent, and what of it is waited for."""
    with count() as traffic, recording() as recorder:
        network(tokens).backward()
        optimizer.step()
        returned = time.monotonic()
    events = [event for event in recorder.timeline() if event.kind == "communication" and event.stop <= returned]
    arrived = [_operation(event.name) for event in events]
    return {"traffic": traffic, "arrived": arrived if dist.get_backend() == BACKEND else None}


def _operation(name: str) -> str:
    """What `Traffic` calls it.

    >>> [_operation(name) for name in ("allgather_base", "reduce_scatter_base", "reduce", "send to 1")]
    ['all_gather', 'reduce_scatter', 'reduce', 'send']
    """
    return next(one for one in OPERATIONS if name.replace("_", "").startswith(one.replace("_", "")))


def _looked_at(network: nn.Module) -> Callable:
    """What takes a step in which is looked at what is held."""
    trained = [parameter for parameter in network.parameters() if parameter.requires_grad]
    look = _Look(network, Enough.on(trained, dist.get_world_size()))
    for parameter in trained:
        parameter.register_post_accumulate_grad_hook(look)

    def step(network: nn.Module, optimizer, tokens: Tensor) -> dict:
        before = _alive(network)
        loss = network(tokens)
        before |= _alive(network)  # activations; all are kept alive, so that no address comes twice
        look.begin(before)
        loss.backward()
        look()
        optimizer.step()
        del loss, before
        return look.after()

    return step


def _cut(found: dict) -> bool:
    """Whether the parameters have other shapes than they had, so that there's no going on."""
    before, after = found["start"], found["steps"][-1]["parameters"]
    return any(name not in after or after[name].shape != value.shape for name, value in before.items())


def _shapes(alive: list) -> list[tuple[int, ...]]:
    """The largest first."""
    return [shape for _, shape in sorted(alive, key=lambda one: -one[0].nbytes())]


class _Look:
    """Called in backward, after each gradient: remembers the most that is held besides what there was before it.

    Gloo's thread keeps the tensors of a collective for some moments after it is done, so what looks like too much is
    looked at again.
    """

    def __init__(self, network: nn.Module, enough: Enough):
        self.network, self.enough, self.patience = network, enough, 0.5  # seconds, in all
        self.begin(None)

    def begin(self, before: dict | None) -> None:
        self.before, self.most, self.shapes = before, 0, []

    def __call__(self, *_) -> None:
        if self.before is None:
            return
        new = self._settled(set(self.before), self.enough.during)
        held = sum(storage.nbytes() for storage, _ in new)
        if held > self.most:
            self.most, self.shapes = held, _shapes(new)

    def after(self) -> dict:
        """What was held in backward, and what is held now besides the model and gradients; keys as `train` has them."""
        self.before = None
        gc.collect()
        own = [*self.network.parameters(), *self.network.buffers()]
        known = {one.untyped_storage().data_ptr(): one.untyped_storage() for one in own}
        more = sum(storage.nbytes() for storage in known.values()) - bytes_of(own)  # what parameters are views of
        gradients = {p.grad.untyped_storage().data_ptr() for p in self.network.parameters() if p.grad is not None}
        others = self._settled({*known, *gradients}, self.enough.between - more)
        return {
            "between": more + sum(storage.nbytes() for storage, _ in others),
            "between_shapes": _shapes(others),
            "during": self.most,
            "during_shapes": self.shapes,
        }

    def _settled(self, known: set[int], enough: float) -> list:
        """What is alive besides the known, once it is no more than enough, or when patience is at its end."""
        while True:
            found = [one for address, one in _alive(self.network).items() if address not in known]
            if self.patience <= 0 or sum(storage.nbytes() for storage, _ in found) <= enough:
                return found
            del found
            time.sleep(0.005)
            self.patience -= 0.005


def _odd(network: nn.Module) -> str:
    """What the parameters are if they are no longer plain float32 tensors, "" if they are."""
    named = list(network.named_parameters())
    if any(hasattr(parameter.data, "full_tensor") for _, parameter in named):
        return "DTensors"
    other = {parameter.dtype for _, parameter in named} - {torch.float32}
    return enumerated(sorted(str(dtype).removeprefix("torch.") for dtype in other)) if other else ""


def copies(network: nn.Module) -> dict[str, np.ndarray]:
    """Each parameter by its name, a tied one once: copies as float32 arrays of its shape."""
    return {name: parameter.detach().numpy().copy() for name, parameter in network.named_parameters()}


# ---------------------------------------------------------------- on a single process


@dataclass(frozen=True)
class Way:
    """Adam on a single process: as it should be by default, and with something changed as one gets it wrong.

    Attributes:
        scale: given the number of ranks, what the mean gradient is multiplied by.
        accumulates: the gradients of earlier steps stay, and each new one is added.
        forgets: the moments begin at zero in every step.
        counts: t is 1, 2, …; else it is 1 in every step.
        corrects: the moments are divided by 1 - beta^t.
        eps, lr: of Adam.
        ranks: whose batches are trained on; those of all ranks if None.
    """

    scale: Callable[[int], float] = lambda ranks: 1.0
    accumulates: bool = False
    forgets: bool = False
    counts: bool = True
    corrects: bool = True
    eps: float = EPS
    lr: float = LR
    ranks: Sequence[int] | None = None

    def __call__(self, sizes: Sizes, seed: int, world_size: int, steps: int) -> list[dict[str, Tensor]]:
        """The parameters after 0, 1, …, `steps` steps: a `snapshot` of each."""
        network = Network(sizes, seed)
        trained = [parameter for parameter in network.parameters() if parameter.requires_grad]
        first, second = ([torch.zeros_like(p) for p in trained] for _ in range(2))
        found = [snapshot(network)]
        for step in range(steps):
            ranks = range(world_size) if self.ranks is None else self.ranks
            network(torch.cat([_batch(sizes, seed, rank, step) for rank in ranks])).backward()
            t = step + 1 if self.counts else 1
            for parameter, m, v in zip(trained, first, second):
                g = parameter.grad * self.scale(world_size)
                m.mul_(0 if self.forgets else 0.9).add_(0.1 * g)
                v.mul_(0 if self.forgets else 0.999).add_(0.001 * g * g)
                correct = (1 - 0.9**t, 1 - 0.999**t) if self.corrects else (1, 1)
                parameter.data -= self.lr * (m / correct[0]) / ((v / correct[1]).sqrt() + self.eps)
                if not self.accumulates:
                    parameter.grad = None
            found.append(snapshot(network))
        return found


def snapshot(network: nn.Module) -> dict[str, Tensor]:
    """Each parameter by its name, a tied one once: copies that nothing changes any more."""
    return {name: parameter.detach().clone() for name, parameter in network.named_parameters()}


def reference(sizes: Sizes, seed: int, world_size: int) -> list[dict[str, Tensor]]:
    """torch's own Adam on the whole batch: a `snapshot` before the first step, and one after each."""
    network = Network(sizes, seed)
    adam = torch.optim.Adam([p for p in network.parameters() if p.requires_grad], lr=LR, eps=EPS)
    steps = [snapshot(network)]
    for step in range(STEPS):
        network(torch.cat([_batch(sizes, seed, rank, step) for rank in range(world_size)])).backward()
        adam.step()
        adam.zero_grad()
        steps.append(snapshot(network))
    return steps


@contextlib.contextmanager
def one_thread() -> Iterator[None]:
    """Inside, torch computes in one thread: for tensors as small as these a second one only waits, and makes wait."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        yield
    finally:
        torch.set_num_threads(threads)
