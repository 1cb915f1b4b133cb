"""Some steps of training with a learner's ZeRO-2: on live ranks, and as a single process takes them.

What a rank holds is seen through Python's garbage collector: the memory of every tensor that is alive.
"""

from __future__ import annotations

import contextlib
import gc
import math
import random
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass

import torch
import torch.distributed as dist
from torch import Tensor, nn

from course_utils.grading.judged import drawn
from course_utils.traffic import count

STEPS = 4
LR, EPS = 0.05, 1e-3  # with the usual 1e-8 Adam hides a gradient that is N times too large
FLOAT, BATCH = 4, 3  # bytes; sequences in the batch of one rank
FROZEN, TIED = "positions", "embedding"


def bytes_of(tensors: Sequence[Tensor]) -> int:
    return sum(tensor.numel() * tensor.element_size() for tensor in tensors)


@dataclass(frozen=True)
class Sizes:
    """Of the network that the ranks train."""

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
    """The memory of every tensor that is alive and younger than the case, each once, with the shape of one of them."""
    tensors = [one for one in gc.get_objects() if issubclass(type(one), Tensor) and not hasattr(one, "full_tensor")]
    tensors += [*network.parameters(), *network.buffers()]
    tensors += [one.grad for one in tensors if one.is_leaf and one.grad is not None]
    found = {one.untyped_storage().data_ptr(): (one.untyped_storage(), tuple(one.shape)) for one in tensors}
    return {address: one for address, one in found.items() if one[0].nbytes()}


def train(fn: Callable, sizes: Sizes, seed: int) -> dict:
    """Runs on a rank: some steps with the optimizer that `fn` makes; plain values, for a tensor would count as held."""
    network = Network(sizes, seed)
    batches = [_batch(sizes, seed, dist.get_rank(), step) for step in range(STEPS)]
    gc.collect()
    gc.freeze()  # what is there already is no longer listed
    optimizer = fn(network, LR, EPS)
    if not callable(getattr(optimizer, "step", None)):
        return {"type": type(optimizer).__name__}
    found = {"start": copies(network), "steps": []}
    if found["start"] is None:
        return found
    trained = [parameter for parameter in network.parameters() if parameter.requires_grad]
    look = _Look(network, Enough.on(trained, dist.get_world_size()))
    for parameter in trained:
        parameter.register_post_accumulate_grad_hook(look)
    for step, tokens in enumerate(batches):
        # While torch's dispatcher is listened to, Python sees every tensor of backward: so it is one or the other.
        counted = step % 2 == 1
        with count() if counted else contextlib.nullcontext() as traffic:
            before = _alive(network)
            loss = network(tokens)
            before |= _alive(network)  # activations; all are kept alive, so that no address comes twice
            look.begin(None if counted else before)
            loss.backward()
            look()
            optimizer.step()
        del loss, before
        found["steps"].append(look.after() | {"parameters": copies(network), "traffic": traffic})
        if _cut(found):
            break
    return found


def _cut(found: dict) -> bool:
    """Whether the parameters are no longer what they were, so that there's no going on."""
    before, after = found["start"], found["steps"][-1]["parameters"]
    return after is None or any(after[name].shape != value.shape for name, value in before.items())


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
        """What was held in backward, what is held now besides the model, and which gradients are still there."""
        self.before = None
        gc.collect()
        own = [*self.network.parameters(), *self.network.buffers()]
        left = {name: p.grad for name, p in self.network.named_parameters() if p.grad is not None}
        known = {one.untyped_storage().data_ptr(): one.untyped_storage() for one in own}
        more = sum(storage.nbytes() for storage in known.values()) - bytes_of(own)  # what parameters are views of
        gradients = {grad.untyped_storage().data_ptr() for grad in left.values()}
        others = self._settled({*known, *gradients}, self.enough.between - more)
        return {
            "left": list(left),
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


def copies(network: nn.Module) -> dict | None:
    """The parameters as arrays; None if they are no longer plain tensors."""
    if any(hasattr(parameter.data, "full_tensor") for parameter in network.parameters()):
        return None
    return {name: parameter.detach().numpy().copy() for name, parameter in network.named_parameters()}


# ---------------------------------------------------------------- on a single process


@dataclass(frozen=True)
class Way:
    """Adam on a single process: as it should be by default, and with something changed as one gets it wrong."""

    scale: Callable[[int], float] = lambda ranks: 1.0  # of the mean gradient
    accumulates: bool = False
    forgets: bool = False  # the moments
    counts: bool = True  # the steps
    corrects: bool = True  # the bias of the moments
    eps: float = EPS
    lr: float = LR
    ranks: Sequence[int] | None = None  # whose batches; all of them if None

    def __call__(self, sizes: Sizes, seed: int, world_size: int, steps: int) -> list[dict[str, Tensor]]:
        """The parameters after 0, 1, …, `steps` steps."""
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
    return {name: parameter.detach().clone() for name, parameter in network.named_parameters()}


def reference(sizes: Sizes, seed: int, world_size: int) -> list[dict[str, Tensor]]:
    """torch's own Adam on the whole batch."""
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
