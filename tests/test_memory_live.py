"""Memory, live: what ranks hold and what autograd keeps, equal to the prediction to the byte.

The predictions come from shapes alone (`course_utils.memory.exact`), the measurements from storages. Where a
measurement could flatter a prediction (both are ours), it is checked against something else: counts made by hand, the
buckets that DDP hands to a communication hook, the collectives' own sizes.
"""

import contextlib
import itertools
import sys

import cloudpickle
import pytest
import torch
from torch import nn
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard
from torch.distributed.optim import ZeroRedundancyOptimizer
from torch.nn.parallel import DistributedDataParallel
from torch.utils.checkpoint import checkpoint

from course_utils import World
from course_utils.memory import (
    ADAM,
    BF16,
    FP32,
    MOMENTUM,
    MUON,
    SGD,
    Memory,
    ddp_states,
    fsdp_states,
    fused_attention,
    layer_terms,
    measure_states,
    model_states,
    saved_bytes,
    shapes_of,
    torch_terms,
    transformer_layer,
    unfused_attention,
    zero_redundancy_states,
)
from course_utils.models import small_gpt
from course_utils.traffic import count

cloudpickle.register_pickle_by_value(sys.modules[__name__])

COUNTERS = "optimizer's step counters"
BUCKETS = "DDP's bucket copies"
PADDING = "padding of parameters"
GRADIENT_PADDING = "padding of gradients"
GATHERED = "gathered parameters"


@pytest.fixture(scope="module")
def worlds():
    with contextlib.ExitStack() as stack:
        yield {n: stack.enter_context(World(n)) for n in (2, 4)}


def odd_model():
    """Rows that 2 and 4 don't divide: 33, 5 and 1. 33·7 + 33 + 5·33 + 5 + 5 + 5 + 1·5 + 1 = 450 parameters."""
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(7, 33), nn.GELU(), nn.Linear(33, 5), nn.LayerNorm(5), nn.Linear(5, 1))


ODD = [(33, 7), (33,), (5, 33), (5,), (5,), (5,), (1, 5), (1,)]


def steps(model, optimizer, inputs, after_forward=lambda: None, n=3):
    """Some training steps; gradients are left in place after the last one."""
    for step in range(n):
        loss = model(inputs).float().sum()
        if step == n - 1:
            after_forward()
        loss.backward()
        optimizer.step()
        if step < n - 1:
            optimizer.zero_grad()


OPTIMIZERS = {
    "adam": (ADAM, lambda params: torch.optim.Adam(params, lr=1e-3)),
    "adamw": (ADAM, lambda params: torch.optim.AdamW(params, lr=1e-3)),
    "momentum": (MOMENTUM, lambda params: torch.optim.SGD(params, lr=1e-3, momentum=0.9)),
    "sgd": (SGD, lambda params: torch.optim.SGD(params, lr=1e-3)),
}


# ---------------------------------------------------------------- one process


def test_the_model_of_these_tests_has_the_shapes_and_parameters_counted_by_hand():
    assert list(shapes_of(odd_model()).values()) == ODD
    assert sum(p.numel() for p in odd_model().parameters()) == 231 + 33 + 165 + 5 + 5 + 5 + 5 + 1 == 450


def test_a_tied_parameter_counts_once():
    tied = small_gpt(layers=1, hidden=8, heads=2, vocabulary=10, sequence=4)
    # 10·8 + 4·8 + 12·64 + 13·8 + 2·8 = 1000
    assert measure_states(tied) == Memory(parameters=4 * 1000)
    assert "head.weight" not in shapes_of(tied)


@pytest.mark.parametrize("name", OPTIMIZERS)
def test_optimizers_keep_in_torch_what_their_data_says(name):
    optimizer, make = OPTIMIZERS[name]
    model = odd_model()
    live = make(model.parameters())
    steps(model, live, torch.ones(2, 7))
    expected = {"adam": 2 * 4 * 450, "adamw": 2 * 4 * 450, "momentum": 4 * 450, "sgd": 0}[name]
    counters = 4 * 8 if "adam" in name else 0  # eight tensors
    measured = measure_states(model, live)
    assert measured == Memory(1800, 1800, expected, extra={COUNTERS: counters})
    assert measured == ddp_states(ODD, optimizer=optimizer, gradient_as_bucket_view=True)
    assert optimizer.bytes_per_parameter(FP32) * 450 == expected


def test_muon_keeps_one_buffer_for_matrices_and_refuses_the_rest():
    weight = nn.Parameter(torch.ones(6, 4))
    muon = torch.optim.Muon([weight])
    weight.grad = torch.ones(6, 4)
    muon.step()
    assert measure_states(nn.ParameterList([weight]), muon).optimizer == 4 * 24 == 24 * MUON.bytes_per_parameter(FP32)
    with pytest.raises(ValueError, match="2D"):
        torch.optim.Muon([nn.Parameter(torch.ones(6))])


def test_bf16_everywhere_is_what_torch_does_with_a_bf16_model():
    model = odd_model().bfloat16()
    adam = torch.optim.Adam(model.parameters())
    steps(model, adam, torch.ones(2, 7, dtype=torch.bfloat16))
    assert measure_states(model, adam) == Memory(900, 900, 1800, extra={COUNTERS: 32})
    assert measure_states(model, adam) == ddp_states(ODD, precision=BF16, gradient_as_bucket_view=True)


def test_buffers_are_a_term():
    assert measure_states(nn.BatchNorm1d(3)).extra == {"buffers": 3 * 4 + 3 * 4 + 8}  # mean, variance, an int64 count


def test_before_the_first_step_there_is_no_gradient_and_no_state():
    model = odd_model()
    assert measure_states(model, torch.optim.Adam(model.parameters())) == Memory(parameters=1800)


# ---------------------------------------------------------------- DDP


def under_ddp(view, zero_optimizer, name="adam", cap=None, step_counts=3):
    model = DistributedDataParallel(odd_model(), gradient_as_bucket_view=view, bucket_cap_mb=cap)
    make = OPTIMIZERS[name][1]
    if zero_optimizer:
        kinds = {"adam": torch.optim.Adam, "momentum": torch.optim.SGD}
        options = {"adam": {"lr": 1e-3}, "momentum": {"lr": 1e-3, "momentum": 0.9}}[name]
        optimizer = ZeroRedundancyOptimizer(model.parameters(), optimizer_class=kinds[name], **options)
    else:
        optimizer = make(model.parameters())
    steps(model, optimizer, torch.ones(2, 7), n=step_counts)
    return measure_states(model, optimizer)


@pytest.mark.parametrize("world_size", (2, 4))
@pytest.mark.parametrize("view", (False, True))
def test_ddp_holds_everything_and_its_buckets_unless_gradients_are_views_of_them(worlds, world_size, view):
    by_hand = Memory(1800, 1800, 3600, extra={COUNTERS: 32, BUCKETS: 0 if view else 1800})
    assert worlds[world_size].run(under_ddp, view, False) == [by_hand] * world_size
    assert ddp_states(ODD, gradient_as_bucket_view=view) == by_hand


@pytest.mark.parametrize("step_counts", (1, 2, 3))
def test_ddp_s_buckets_are_as_large_before_and_after_they_are_rebuilt_and_however_small(worlds, step_counts):
    for cap in (None, 0.0005):  # 524 bytes: several buckets
        assert worlds[2].run(under_ddp, False, False, cap=cap, step_counts=step_counts) == [ddp_states(ODD)] * 2


def test_ddp_s_account_of_its_buckets_is_what_a_hook_gets_and_they_are_no_views(worlds):
    def through_a_hook(view):
        model = DistributedDataParallel(odd_model(), gradient_as_bucket_view=view, bucket_cap_mb=0.0005)
        seen = {}

        def hook(state, bucket):
            storage = bucket.buffer().untyped_storage()
            seen[storage.data_ptr()] = storage.nbytes()
            done = torch.futures.Future()
            done.set_result(bucket.buffer())
            return done

        model.register_comm_hook(None, hook)
        steps(model, torch.optim.SGD(model.parameters(), lr=1e-3), torch.ones(2, 7), n=2)
        seen.clear()
        model(torch.ones(2, 7)).sum().backward()
        gradients = {p.grad.untyped_storage().data_ptr() for p in model.parameters()}
        return sum(seen.values()), gradients == set(seen), gradients & set(seen)

    for bytes_seen, same, shared in worlds[2].run(through_a_hook, False):
        assert (bytes_seen, same, shared) == (1800, False, set())
    for bytes_seen, same, _ in worlds[2].run(through_a_hook, True):
        assert (bytes_seen, same) == (1800, True)


def test_buckets_stay_when_the_gradients_that_were_views_of_them_are_dropped(worlds):
    def dropped():
        model = DistributedDataParallel(odd_model(), gradient_as_bucket_view=True)
        adam = torch.optim.Adam(model.parameters())
        steps(model, adam, torch.ones(2, 7))
        adam.zero_grad(set_to_none=True)
        return measure_states(model)

    assert worlds[2].run(dropped) == [Memory(parameters=1800, extra={BUCKETS: 1800})] * 2


# ---------------------------------------------------------------- ZeroRedundancyOptimizer


def test_zero_redundancy_optimizer_hands_out_whole_tensors(worlds):
    # largest first, to whoever has least: 231 | 165; 33 to rank 1 (198); 5, 5, 5, 5 to rank 1 (218); 1 to rank 1
    by_hand = [
        Memory(1800, 1800, 8 * 231, extra={COUNTERS: 4 * 1, BUCKETS: 1800}),
        Memory(1800, 1800, 8 * 219, extra={COUNTERS: 4 * 7, BUCKETS: 1800}),
    ]
    assert worlds[2].run(under_ddp, False, True) == by_hand == zero_redundancy_states(ODD, 2)
    # 231 | 165 | 33 | the rest: 5, 5, 5, 5 and 1
    by_hand = [8 * 231, 8 * 165, 8 * 33, 8 * 21]
    measured = worlds[4].run(under_ddp, False, True)
    assert [rank.optimizer for rank in measured] == by_hand
    assert measured == zero_redundancy_states(ODD, 4)


@pytest.mark.parametrize("world_size", (2, 4))
def test_zero_redundancy_optimizer_with_views_and_momentum(worlds, world_size):
    measured = worlds[world_size].run(under_ddp, True, True, name="momentum")
    predicted = zero_redundancy_states(ODD, world_size, optimizer=MOMENTUM, gradient_as_bucket_view=True)
    assert measured == predicted


def test_the_terms_beyond_zero_1_add_up_to_nothing_over_the_ranks():
    """Handing out whole tensors moves bytes between ranks and creates none."""
    formula = model_states(450, precision=FP32, zero=1, data_parallel=4)
    differences = [rank.minus(formula) for rank in zero_redundancy_states(ODD, 4)]
    assert sum(difference["optimizer"] for difference in differences) == 0
    assert {name for difference in differences for name in difference} == {"optimizer", COUNTERS, BUCKETS}


def test_a_gpt_on_zero_redundancy_optimizer(worlds):
    def gpt_states():
        model = DistributedDataParallel(small_gpt(layers=2, hidden=16, heads=2, vocabulary=50, sequence=8))
        optimizer = ZeroRedundancyOptimizer(model.parameters(), optimizer_class=torch.optim.Adam, lr=1e-3)
        steps(model, optimizer, torch.zeros(2, 8, dtype=torch.long))
        return measure_states(model, optimizer), shapes_of(model)

    measured, shapes = zip(*worlds[4].run(gpt_states))
    assert list(measured) == zero_redundancy_states(shapes[0], 4)


# ---------------------------------------------------------------- FSDP2


def under_fsdp(reshard, name="adam", dtype=torch.float32, **options):
    """Two layers and the rest on its own; the states after the third forward, and after the third step."""
    model = odd_model().to(dtype)
    for module in (model[0], model[2], model):
        fully_shard(module, reshard_after_forward=reshard, **options)
    optimizer = OPTIMIZERS[name][1](model.parameters())
    between = []
    steps(model, optimizer, torch.ones(2, 7, dtype=dtype), after_forward=lambda: between.append(measure_states(model)))
    return between[0], measure_states(model, optimizer), dict(shapes_of(model))


@pytest.mark.parametrize("name", OPTIMIZERS)
@pytest.mark.parametrize("world_size", (2, 4))
def test_fsdp_holds_shards_their_padding_and_nothing_else_after_a_step(worlds, world_size, name):
    for reshard in (True, False):
        between, after, shapes = zip(*worlds[world_size].run(under_fsdp, reshard, name))
        assert list(shapes[0].values()) == ODD  # the whole ones, also when sharded
        assert list(after) == fsdp_states(ODD, world_size, optimizer=OPTIMIZERS[name][0])


def test_fsdp_by_hand(worlds):
    """Rows over 4 ranks: 33 as 9, 9, 9, 6; 5 as 2, 2, 1, 0; 1 as 1, 0, 0, 0. All ranks allocate 9, 2 and 1."""
    allocated = 9 * 7 + 9 + 2 * 33 + 2 + 2 + 2 + 5 + 1
    held = [allocated, allocated - 6, 9 * 7 + 9 + 33 + 3, 6 * 7 + 6]
    by_hand = [
        Memory(
            4 * mine,
            4 * mine,
            8 * mine,
            extra={COUNTERS: 32, PADDING: 4 * (allocated - mine), GRADIENT_PADDING: 4 * (allocated - mine)},
        )
        for mine in held
    ]
    assert sum(held) == 450
    assert [after for _, after, _ in worlds[4].run(under_fsdp, True)] == by_hand == fsdp_states(ODD, 4)


@pytest.mark.parametrize("world_size", (2, 4))
def test_without_resharding_the_whole_parameters_stay_until_backward(worlds, world_size):
    rows = {2: (34, 6, 2), 4: (36, 8, 4)}[world_size]  # padded
    whole = 4 * (rows[0] * 8 + rows[1] * 34 + 2 * rows[1] + rows[2] * 6)
    gathered = [between.extra.get(GATHERED, 0) for between, _, _ in worlds[world_size].run(under_fsdp, False)]
    assert gathered == [whole] * world_size
    assert [rank.extra[GATHERED] for rank in fsdp_states(ODD, world_size, gathered=True)] == gathered
    for between, after, _ in worlds[world_size].run(under_fsdp, True):
        # at that moment there are the shards and nothing else: gradients were dropped, state was not asked for
        assert between == Memory(after.parameters, extra={PADDING: after.extra.get(PADDING, 0)})


def test_by_default_the_outermost_module_stays_gathered(worlds):
    between = [between for between, _, _ in worlds[2].run(under_fsdp, None)]
    own = ["3.weight", "3.bias", "4.weight", "4.bias"]  # what is in no layer that was sharded by itself
    shapes = shapes_of(odd_model())
    predicted = [rank.extra[GATHERED] for rank in fsdp_states(shapes, 2, gathered=own)]
    assert [one.extra[GATHERED] for one in between] == predicted == [4 * (6 + 6 + 10 + 2)] * 2


def two_modules_in_one_group():
    model = odd_model()
    fully_shard([model[0], model[2]])
    fully_shard(model)
    optimizer = torch.optim.Adam(model.parameters())
    steps(model, optimizer, torch.ones(2, 7))
    return measure_states(model, optimizer)


def test_modules_that_were_sharded_together_count_once(worlds):
    assert worlds[2].run(two_modules_in_one_group) == fsdp_states(ODD, 2)


def test_fsdp_in_bf16(worlds):
    after = [after for _, after, _ in worlds[4].run(under_fsdp, True, dtype=torch.bfloat16)]
    assert after == fsdp_states(ODD, 4, precision=BF16)


def test_fsdp_with_mixed_precision_gathers_bf16_and_keeps_the_rest_in_fp32(worlds):
    policy = MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32)
    between, after, _ = zip(*worlds[2].run(under_fsdp, False, mp_policy=policy))
    assert list(after) == fsdp_states(ODD, 2)
    predicted = fsdp_states(ODD, 2, gathered=True, gathered_bytes=2)
    assert [one.extra[GATHERED] for one in between] == [one.extra[GATHERED] for one in predicted]


def test_what_fsdp_gathers_is_what_its_collectives_carry(worlds):
    """Two accounts of the padding: the storages, and the sizes of the collectives that `count()` sees."""

    def counted():
        model = odd_model()
        fully_shard(model, reshard_after_forward=False)
        with count() as traffic:
            model(torch.ones(2, 7)).sum().backward()
        return {row.operation: row.size for row in traffic}

    padded = fsdp_states(ODD, 4, gathered=True)[0].extra[GATHERED]
    assert worlds[4].run(counted) == [{"all_gather": padded, "reduce_scatter": padded}] * 4


def test_rows_that_divide_leave_only_the_counters(worlds):
    def even():
        model = transformer_layer(hidden=16, heads=2)
        fully_shard(model)
        adam = torch.optim.Adam(model.parameters())
        steps(model, adam, torch.ones(1, 3, 16))
        return measure_states(model, adam)

    formula = model_states(12 * 16**2 + 13 * 16, precision=FP32, zero=3, data_parallel=4)
    assert [rank.minus(formula) for rank in worlds[4].run(even)] == [{COUNTERS: 4 * 12}] * 4  # 12 tensors


# ---------------------------------------------------------------- activations


def checkpointed(attention):
    return lambda *args: checkpoint(attention, *args, use_reentrant=False)


def saved_by_a_layer(shape, dtype, attention, dropout, attention_dropout, recompute):
    batch, sequence, hidden, heads = shape
    core = checkpointed(attention) if recompute == "selective" else attention
    layer = transformer_layer(hidden, heads, dropout=dropout, attention_dropout=attention_dropout, attention=core).to(
        dtype
    )
    x = torch.randn(batch, sequence, hidden, dtype=dtype, requires_grad=True)
    with saved_bytes() as saved:
        _ = checkpoint(layer, x, use_reentrant=False) if recompute == "full" else layer(x)
    return saved


def predicted(shape, dtype, attention, dropout, attention_dropout, recompute):
    batch, sequence, hidden, heads = shape
    options = {
        "recompute": recompute,
        "flash": attention is fused_attention,
        "dropout": dropout > 0,
        "attention_dropout": attention_dropout > 0,
        "value_bytes": dtype.itemsize,
    }
    paper = layer_terms(sequence, batch, hidden, heads, **options)
    return sum(paper.values()) + sum(torch_terms(sequence, batch, hidden, heads, **options).values())


SHAPES = [(2, 16, 32, 4), (1, 8, 16, 2), (3, 5, 24, 1), (4, 1, 8, 2), (1, 1, 4, 1), (2, 48, 32, 8)]


@pytest.mark.parametrize("shape", SHAPES, ids=str)  # batch, sequence, hidden, heads
@pytest.mark.parametrize("dtype", (torch.bfloat16, torch.float16, torch.float32), ids=str)
def test_a_layer_saves_what_paper_and_named_terms_say_to_the_byte(shape, dtype):
    attentions, dropouts = (unfused_attention, fused_attention), (0.0, 0.1)
    recomputes = ("none", "selective", "full")
    for case in itertools.product(attentions, dropouts, dropouts, recomputes):
        assert saved_by_a_layer(shape, dtype, *case).bytes == predicted(shape, dtype, *case), case


def test_the_paper_s_formula_and_three_differences():
    """b=2, s=16, h=32, a=4: sbh = 1024, as²b = 2048; 34 sbh + 5 as²b = 34816 + 10240 = 45056."""
    saved = saved_by_a_layer((2, 16, 32, 4), torch.bfloat16, unfused_attention, 0.1, 0.1, "none")
    masks = 2 * 1024 + 2048  # one byte more for each value of three masks
    statistics = 2 * 2 * 2 * 32  # two norms, mean and 1/std, two bytes, 32 tokens
    causal = 16 * 16  # one byte each
    assert saved.bytes == 45056 + masks + statistics + causal
    assert sum(layer_terms(16, 2, 32, 4).values()) == 45056


def test_each_line_of_the_layer_saves_what_the_paper_s_terms_say():
    """With one-byte masks replaced by two-byte ones, line by line: 2 sbh for a matrix's input, 8 sbh in the MLP, ..."""
    saved = saved_by_a_layer((2, 16, 32, 4), torch.bfloat16, unfused_attention, 0.1, 0.1, "none")
    by_source = {}
    for line, size in saved.by_line().items():
        by_source.setdefault(line.split(": ", 1)[1].split("  #")[0], []).append(size)
    sbh, as2b = 1024, 2048
    assert by_source == {
        "normed = self.norm_1(x)": [2 * sbh + 128],
        "qkv = self.qkv(normed)": [2 * sbh],
        "scores = query @ key.transpose(-2, -1) / math.sqrt(query.size(-1))": [4 * sbh],
        "scores = scores.masked_fill(later, -math.inf)": [256],
        "weights = scores.softmax(-1)": [2 * as2b],
        "weights = drop(weights, dropout)": [2 * as2b],
        "return weights @ value": [2 * as2b + 2 * sbh],
        "out = self.projection(mixed)": [2 * sbh],
        "out = drop(out, self.dropout, self.training)": [2 * sbh, 2 * sbh],
        "normed = self.norm_2(x)": [2 * sbh + 128],
        "inner = self.up(normed)": [2 * sbh],
        "inner = gelu(inner)": [8 * sbh],
        "out = self.down(inner)": [8 * sbh],
    }


def test_a_dropout_mask_on_the_cpu_has_the_values_type():
    for dtype in (torch.float32, torch.bfloat16):
        x = torch.ones(100, dtype=dtype, requires_grad=True)
        with saved_bytes() as saved:
            nn.functional.dropout(x, 0.5)
        assert [(one.dtype, one.bytes) for one in saved] == [(str(dtype).removeprefix("torch."), 100 * dtype.itemsize)]


def test_a_stack_of_layers_saves_the_sum_and_checkpointing_leaves_the_inputs():
    shape = 2, 16, 32, 4
    layers = [transformer_layer(32, 4, dropout=0.1).bfloat16() for _ in range(3)]
    x = torch.randn(2, 16, 32, dtype=torch.bfloat16, requires_grad=True)
    with saved_bytes() as saved:
        y = x
        for layer in layers:
            y = layer(y)
    one = predicted(shape, torch.bfloat16, unfused_attention, 0.1, 0.1, "none")
    assert saved.bytes == 3 * one
    with saved_bytes() as saved:
        y = x
        for layer in layers:
            y = checkpoint(layer, y, use_reentrant=False)
    assert saved.bytes == 3 * 2 * 1024


def test_saved_bytes_counts_storages_once_and_whole_and_leaves_parameters_out():
    weight = nn.Parameter(torch.ones(4, 4))
    x = torch.ones(2, 4, requires_grad=True)
    big = torch.ones(10, 4)
    with saved_bytes() as saved:
        x @ weight.t()  # keeps x (32 bytes) and a view of the parameter
        x * x  # keeps x twice: the same storage
        x * big[:2]  # keeps a view of 32 bytes, and so all 160
    assert [one.bytes for one in saved] == [32, 160]
    assert saved.memory == Memory(activations=192)


def test_saved_bytes_nests_and_counts_nothing_without_gradients():
    x = torch.ones(4, requires_grad=True)
    with saved_bytes() as outer, torch.no_grad():
        x.exp()
    assert outer.bytes == 0
    with saved_bytes() as saved:
        y = x.exp()
        assert saved.bytes == 16  # it can be read while it grows
    y.sum().backward()
    assert torch.equal(x.grad, x.exp())  # results are as without
    assert isinstance(saved.tensors, tuple)  # and is a value afterwards


def test_one_saved_bytes_serves_one_block():
    counting = saved_bytes()
    with counting:
        pass
    with pytest.raises(RuntimeError, match="entered before"), counting:
        pass


def test_on_a_live_rank_the_count_is_the_same(worlds):
    case = (2, 16, 32, 4), torch.bfloat16, unfused_attention, 0.1, 0.1, "none"
    measured = worlds[2].run(saved_by_a_layer, *case)
    assert [saved.bytes for saved in measured] == [predicted(*case)] * 2


@pytest.mark.parametrize("call", (measure_states, shapes_of), ids=("measure_states", "shapes_of"))
def test_what_is_no_module_is_refused(call):
    with pytest.raises(TypeError, match="model is a list: a torch module was expected"):
        call([1])


def test_what_is_no_optimizer_is_refused():
    with pytest.raises(TypeError, match="optimizer is a str"):
        measure_states(nn.Linear(1, 1), "adam")
