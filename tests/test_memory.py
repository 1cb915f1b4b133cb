"""Memory by arithmetic, against published numbers; each stands here with its source, and its tolerance is the source's.

GB is 10⁹ bytes. The live half is tested in test_memory_live.py.
"""

import copy
import dataclasses
import math
import pickle
import subprocess
import sys
from fractions import Fraction

import pytest

from course_utils import plots
from course_utils.hardware import H100
from course_utils.memory import (
    ADAM,
    ADAM_8BIT,
    BF16,
    BF16_FP32_MOMENTS,
    FP32,
    MEGATRON_BF16,
    MEGATRON_FP16,
    MIXED_BF16,
    MIXED_FP16,
    MOMENTUM,
    MUON,
    SGD,
    Layout,
    Memory,
    Optimizer,
    Precision,
    Recompute,
    Saved,
    SavedTensor,
    activations,
    ddp_states,
    deepspeed_states,
    fsdp_states,
    held_parameters,
    in_flight,
    layer_activations,
    layer_terms,
    model_states,
    side_by_side,
    stage_layers,
    torch_terms,
    training_memory,
    zero_redundancy_states,
)
from course_utils.models import KORTHIKANTI, MODELS, Experts, gpt, model

STAGES = (0, 1, 2, 3)


# ---------------------------------------------------------------- ZeRO: Rajbhandari et al. 2020, arXiv 1910.02054


def test_zero_section_3_1_and_figure_1_as_formulas():
    """16 Ψ; 4 Ψ + 12 Ψ/N; 2 Ψ + 14 Ψ/N; 16 Ψ/N."""
    psi, n = 960, 8
    totals = [model_states(psi, zero=stage, data_parallel=n).total for stage in STAGES]
    assert totals == [16 * psi, 4 * psi + 12 * psi // n, 2 * psi + 14 * psi // n, 16 * psi // n]


def test_zero_figure_1():
    """Ψ = 7.5 B, N = 64, K = 12: 120, 31.4, 16.6 and 1.9 GB."""
    for precision in (MIXED_FP16, MIXED_BF16):
        gigabytes = [
            float(model_states(7.5e9, precision=precision, zero=s, data_parallel=64).total / 10**9) for s in STAGES
        ]
        assert gigabytes == pytest.approx([120, 31.4, 16.6, 1.9], abs=0.05)


ZERO_TABLE_1 = {
    7.5e9: {
        1: [120, 120, 120], 4: [52.5, 41.3, 30], 16: [35.6, 21.6, 7.5], 64: [31.4, 16.6, 1.88],
        256: [30.4, 15.4, 0.47], 1024: [30.1, 15.1, 0.12],
    },
    128e9: {
        1: [2048, 2048, 2048], 4: [896, 704, 512], 16: [608, 368, 128], 64: [536, 284, 32], 256: [518, 263, 8],
        1024: [513, 257, 2],
    },
    1e12: {
        1: [16000, 16000, 16000], 4: [7000, 5500, 4000], 16: [4750, 2875, 1000], 64: [4187, 2218, 250],
        256: [4046, 2054, 62.5], 1024: [4011, 2013, 15.6],
    },
}  # fmt: skip


@pytest.mark.parametrize("parameters", ZERO_TABLE_1)
def test_zero_table_1(parameters):
    """To 0.06 GB below 200 GB, to 1 GB above, where the paper cuts decimals off."""
    for ranks, printed in ZERO_TABLE_1[parameters].items():
        for stage, gigabytes in zip((1, 2, 3), printed):
            total = model_states(parameters, zero=stage, data_parallel=ranks).total / 10**9
            assert float(total) == pytest.approx(gigabytes, abs=0.06 if gigabytes < 200 else 1)


# ---------------------------------------------------------------- bytes per parameter, by who counts


def test_what_adam_adds_to_70_billion_parameters_by_who_counts():
    """140 GB of BF16 weights, and 420, 560, 700, 840, 1,120, 1,260 or 1,400 GB: each is right for one convention."""

    def gigabytes(precision, *purposes):
        states = model_states(70e9, optimizer=ADAM, precision=precision)
        return sum(getattr(states, purpose) for purpose in purposes) / 10**9

    everything = "parameters", "gradients", "optimizer"
    assert gigabytes(BF16, "parameters") == 140
    assert gigabytes(BF16, "gradients", "optimizer") == 420  # three more copies, all BF16
    assert gigabytes(BF16, *everything) == 560  # and with the weights
    assert gigabytes(BF16_FP32_MOMENTS, "optimizer") == 560  # two FP32 moments alone
    assert gigabytes(BF16_FP32_MOMENTS, "gradients", "optimizer") == 700  # BF16 gradients beside FP32 moments
    assert gigabytes(BF16_FP32_MOMENTS, "parameters", "optimizer") == 700  # BF16 weights and FP32 moments
    assert gigabytes(MIXED_BF16, "optimizer") == 840  # FP32 master weights and moments
    assert gigabytes(MIXED_BF16, *everything) == 1120  # ZeRO: 16-bit weights and gradients besides
    assert gigabytes(MEGATRON_BF16, *everything) == 1260  # Megatron-LM with BF16, Hugging Face
    assert gigabytes(MEGATRON_FP16, *everything) == 1400  # Megatron-LM with FP16


@pytest.mark.parametrize("d", (1, 2, 8, 64))
def test_megatron_s_distributed_optimizer(d):
    """Megatron-LM, docs/user-guide/features/dist_optimizer.md: bytes per parameter, plain and distributed."""
    table = {
        MEGATRON_FP16: (20, 4 + Fraction(16, d)),
        MEGATRON_BF16: (18, 6 + Fraction(12, d)),
        FP32: (16, 8 + Fraction(8, d)),
    }
    for precision, (plain, distributed) in table.items():
        assert model_states(1, precision=precision, data_parallel=d).total == plain
        assert model_states(1, precision=precision, zero=1, data_parallel=d).total == distributed


def test_deepspeed_s_documentation():
    """DeepSpeed docs, Memory Requirements: 4 P + 16 P/N for ZeRO-2, 4 L + 18 P/N for ZeRO-3."""
    p, n, layer = 3_000_000_000, 8, 32_000_000
    assert deepspeed_states(p, zero=2, data_parallel=n).total == 4 * p + 16 * p // n
    assert deepspeed_states(p, zero=3, data_parallel=n, largest_layer=layer).total == 4 * layer + 18 * p // n
    # the paper counts no FP32 gradients: 2 P and 2 P/N less
    assert deepspeed_states(p, zero=2, data_parallel=n).total - model_states(p, zero=2, data_parallel=n).total == (
        2 * p + 2 * p // n
    )


def test_optimizers_by_their_papers():
    per_parameter = {SGD: 0, MOMENTUM: 4, ADAM: 8, MUON: 4}
    assert {one: one.bytes_per_parameter(FP32) for one in per_parameter} == per_parameter
    # Dettmers et al. 2022, arXiv 2110.02861, Section 2.1: a byte each, and an FP32 scale for a block of 2,048
    block = ADAM_8BIT.bytes_per_parameter(FP32) * 2048
    assert block == 2 * (2048 + 4)
    assert float(1 - block / (8 * 2048)) == pytest.approx(0.75, abs=0.001)  # "save 75 %"


def test_muon_for_matrices_and_adam_for_the_rest():
    """Liu et al. 2025, arXiv 2502.16982: one buffer where Adam has two, for the matrices of the layers."""
    only_fp32_state = model_states(100, optimizer=MUON, precision=FP32, matrices=80)
    assert only_fp32_state.optimizer == 80 * 4 + 20 * 8
    llama = model("llama3-8b")
    adam, muon = (training_memory(llama, optimizer=one, precision=FP32).optimizer for one in (ADAM, MUON))
    outside = 2 * 128256 * 4096 + 65 * 4096  # two embeddings and 65 norms stay with Adam
    assert muon == adam - 4 * (llama.parameters - outside)


def test_shares_stay_exact():
    states = model_states(7, zero=3, data_parallel=3)
    assert states.parameters == Fraction(14, 3)
    assert sum([states] * 3).total == 7 * 16


# ---------------------------------------------------------------- Korthikanti et al. 2022, arXiv 2205.05198

TABLE_2 = {
    "none": dict(),
    "tp": dict(tensor_parallel=8),
    "tp_sp": dict(tensor_parallel=8, sequence_parallel=True),
    "tp_selective": dict(tensor_parallel=8, recompute="selective"),
    "tp_sp_selective": dict(tensor_parallel=8, sequence_parallel=True, recompute="selective"),
    "full_recompute": dict(tensor_parallel=8, recompute="full"),
}


def test_section_4_1_part_by_part():
    """Attention 11 sbh + 5 as²b, MLP 19 sbh, layer norms 4 sbh; together sbh (34 + 5as/h)."""
    s, b, h, a = 6, 5, 28, 7
    terms = layer_terms(s, b, h, a)
    mlp = sum(terms[name] for name in ("MLP up: input", "GELU: input", "MLP down: input", "MLP dropout: mask"))
    norms = terms["layer norm 1: input"] + terms["layer norm 2: input"]
    assert (mlp, norms) == (19 * s * b * h, 4 * s * b * h)
    assert sum(terms.values()) - mlp - norms == 11 * s * b * h + 5 * a * s**2 * b
    assert terms["softmax dropout: mask"] == a * s**2 * b and terms["GELU: input"] == 8 * s * b * h


@pytest.mark.parametrize("t", (1, 2, 8))
def test_table_2_as_formulas(t):
    s, b, h, a = 16, 3, 64, 8
    sbh, scores = s * b * h, Fraction(5 * a * s, h * t)
    formulas = {
        "tp": sbh * (10 + Fraction(24, t) + scores),
        "tp_sp": sbh * (Fraction(34, t) + scores),
        "tp_selective": sbh * (10 + Fraction(24, t)),
        "tp_sp_selective": sbh * Fraction(34, t),
        "full_recompute": 2 * sbh,
    }
    for name, formula in formulas.items():
        options = TABLE_2[name] | {"tensor_parallel": t}
        assert sum(layer_terms(s, b, h, a, **options).values()) == formula


GB_PER_LAYER = {  # the formulas of Table 2 on the models of Table 3, to 0.1 %
    "22B": [7.0800, 1.3254, 0.8850, 0.6543, 0.2139, 0.1007],
    "175B": [2.8689, 0.5788, 0.3586, 0.3272, 0.1070, 0.0503],
}


@pytest.mark.parametrize("name", GB_PER_LAYER)
def test_gb_per_layer(name):
    run = KORTHIKANTI[name]
    shape = (run.model.sequence, run.microbatch, run.model.hidden, run.model.heads)
    found = [float(activations(*shape, **options).total / 10**9) for options in TABLE_2.values()]
    assert found == pytest.approx(GB_PER_LAYER[name], rel=0.001)


@pytest.mark.parametrize(
    "heads, sequence, hidden, ratio, saved", [(96, 2048, 12288, 80, 0.70), (128, 2048, 20480, 64, 0.65)]
)  # GPT-3, MT-NLG
def test_section_5_selective_recomputation_saves_65_to_70_percent(heads, sequence, hidden, ratio, saved):
    assert 5 * heads * sequence / hidden == ratio
    whole = activations(sequence, 1, hidden, heads).total
    kept = activations(sequence, 1, hidden, heads, recompute=Recompute.SELECTIVE).total
    assert float(1 - kept / whole) == pytest.approx(saved, abs=0.005)
    assert Fraction(whole, kept) == Fraction(34 + ratio, 34)


def test_section_4_2_3_a_pipeline_keeps_all_layers_on_its_first_stage():
    for p in (1, 2, 8, 35):
        assert in_flight(p) == p  # p micro-batches of L/p layers
        for m in (2, 3, 4) if p > 1 else ():
            assert in_flight(p, chunks=m) == p * (1 + Fraction(p - 1, p * m))


def test_the_other_stages_keep_fewer():
    """Narayanan et al. 2021, Section 2.2.1, and Megatron-LM's schedules.py: the warm-up of rank r is p - r - 1."""
    assert [in_flight(4, stage=stage) for stage in range(4)] == [4, 3, 2, 1]
    assert [in_flight(4, 2, stage=stage) for stage in range(4)] == [2, 2, 2, 1]
    # interleaved, in chunks of which a stage has two: 2 (p - r - 1) + (m - 1) p + 1
    assert [2 * in_flight(4, chunks=2, stage=stage) for stage in range(4)] == [11, 9, 7, 5]
    assert in_flight(4, 4, chunks=2) == 4  # not more than there are


def test_megatron_s_report_of_total_activations():
    """Megatron-LM, theoretical_memory_usage.py (sequence parallel, selective), less the token numbers, 8 s b p / t."""
    for run in KORTHIKANTI.values():
        one, p, t, b = run.model, run.pipeline_parallel, run.tensor_parallel, run.microbatch
        s, h = one.sequence, one.hidden
        reported = s * b * h * 34 * one.layers + s * b * h * p
        if p == 1:
            reported += s * b * h * 4 * (1 + Fraction(one.vocabulary, h))
        layout = Layout(tensor_parallel=t, pipeline_parallel=p, sequence_parallel=True)
        found = training_memory(one, layout, microbatch=b, recompute="selective", flash=False)
        assert found.activations == Fraction(reported, t)


def test_flash_attention_keeps_one_number_per_head_and_token_instead_of_the_scores():
    s, b, h, a = 2048, 1, 12288, 96
    assert activations(s, b, h, a, flash=True).total == 34 * s * b * h + 4 * a * s * b


def test_context_parallelism_cuts_everything_along_the_sequence():
    shape = (64, 2, 32, 4)
    assert activations(*shape, context_parallel=4).total == Fraction(activations(*shape).total, 4)


def test_recomputing_everything_keeps_the_input():
    assert layer_terms(8, 2, 16, 2, recompute="full") == {"layer: input": 2 * 8 * 2 * 16}
    assert torch_terms(8, 2, 16, 2, recompute="full") == {}


def test_layers_and_wider_values_scale():
    assert activations(8, 2, 16, 2, layers=5).total == 5 * activations(8, 2, 16, 2).total
    doubled = activations(8, 2, 16, 2, dropout=False, value_bytes=4).total
    assert doubled == 2 * activations(8, 2, 16, 2, dropout=False).total


# ---------------------------------------------------------------- models on layouts


@pytest.mark.parametrize("name", ["gpt2-medium", "llama3-70b", "llama3-405b", "mixtral-8x7b", "deepseek-v3"])
@pytest.mark.parametrize("pipeline", (1, 4, 16))
def test_the_stages_of_a_pipeline_hold_the_model_once(name, pipeline):
    one = model(name)
    layout = Layout(pipeline_parallel=pipeline)
    held = [held_parameters(one, layout, stage=stage) for stage in range(pipeline)]
    total = sum(stage.dense + stage.experts for stage in held)
    again = one.vocabulary * one.hidden if one.tied and pipeline > 1 else 0  # a tied head is on two stages
    assert total == one.parameters + again


def test_llama_3_405b_has_one_layer_fewer_on_the_outermost_stages():
    """Llama Team 2024, arXiv 2407.21783, Section 3.3.2; 126 layers on 16 stages."""
    assert [len(stage_layers(126, 16, stage)) for stage in range(16)] == [7] + [8] * 14 + [7]
    for layers, stages in ((61, 16), (5, 4), (7, 4), (3, 3), (126, 16)):
        assert [layer for stage in range(stages) for layer in stage_layers(layers, stages, stage)] == list(
            range(layers)
        )


def test_tensor_parallelism_cuts_matrices_and_copies_norms():
    """Shoeybi et al. 2019, arXiv 1909.08053, Section 3, by hand for a layer of h = 8 with 2 ranks."""
    one = gpt(layers=1, hidden=8, heads=2, vocabulary=10, sequence=4)
    embeddings = 10 // 2 * 8 + 4 * 8
    matrices = 12 * 64 // 2
    cut_biases, copied_biases, norms = (3 * 8 + 4 * 8) // 2, 8 + 8, 4 * 8 + 2 * 8
    held = held_parameters(one, Layout(tensor_parallel=2))
    assert held.dense == embeddings + matrices + cut_biases + copied_biases + norms
    assert (held.matrices, held.experts) == (matrices, 0)


def test_few_key_heads_are_copied_and_an_odd_vocabulary_is_padded():
    llama = dataclasses.replace(model("llama3-8b"), layers=1)
    one, sixteen = (held_parameters(llama, Layout(tensor_parallel=t)).dense for t in (1, 16))
    copied = 2 * 4096 * 128 * (16 - 8)  # keys and values: eight heads for sixteen ranks
    norms = 3 * 4096
    assert 16 * (sixteen - norms) == one - norms + copied
    assert held_parameters(gpt(1, 8, 2, 11, 4), Layout(tensor_parallel=2)).dense == (
        held_parameters(gpt(1, 8, 2, 12, 4), Layout(tensor_parallel=2)).dense
    )


def test_expert_parallelism_spreads_experts_and_zero_cuts_what_is_left_of_their_copies():
    mixtral = model("mixtral-8x7b")
    layout = Layout(data_parallel=16, expert_parallel=8, zero=1)
    held = held_parameters(mixtral, layout)
    experts = 32 * 8 * 3 * 4096 * 14336
    assert held.experts == experts // 8
    states = training_memory(mixtral, layout)
    assert states.parameters == 2 * (mixtral.parameters - experts + experts // 8)
    assert states.optimizer == Fraction(12 * (mixtral.parameters - experts), 16) + Fraction(12 * experts // 8, 2)


def test_a_gpt_on_a_layout_is_its_layers_formula_and_its_states():
    run = KORTHIKANTI["175B"]
    layout = Layout(data_parallel=4, tensor_parallel=8, pipeline_parallel=8, zero=1)
    memory = training_memory(run.model, layout, flash=False)
    layer = activations(2048, 1, 12288, 96, tensor_parallel=8).total
    assert memory.activations == 96 * layer + 8 * 2048 * 12288  # and the masks of the embedding's dropout
    assert memory.optimizer == Fraction(6 * memory.parameters, 4)
    last = training_memory(run.model, layout, flash=False, stage=7)
    assert last.activations == 12 * layer + 4 * 2048 * 12288 + Fraction(4 * 2048 * 51200, 8)


def test_a_llama_layer_by_hand():
    """3 tokens, h=8, 4 heads of 2, 2 key heads, f=12: 2·8 for norms, 2·8 for inputs, q 8, k 4, v 4, out 8, MLP 4·12."""
    llama = dataclasses.replace(
        model("llama3-8b"), layers=1, hidden=8, heads=4, kv_heads=2, ffn=12, vocabulary=10, sequence=3
    )
    kept = 2 * 3 * (16 + 16 + 8 + 4 + 4 + 8 + 48)
    assert sum(layer_activations(llama, flash=False).values()) == kept + 2 * 4 * 3 * 3  # the scores
    assert sum(layer_activations(llama).values()) == kept + 4 * 4 * 3  # the log-sum-exp
    assert layer_activations(llama, recompute="full") == {"layer: input": 2 * 3 * 8}
    in_two = layer_activations(llama, layout=Layout(tensor_parallel=2), flash=False)
    assert sum(in_two.values()) == 2 * 3 * (16 + 16) + 2 * 3 * (8 + 4 + 4 + 8 + 48) // 2 + 2 * 2 * 3 * 3


def test_a_layer_of_experts_by_hand():
    moe = dataclasses.replace(
        model("mixtral-8x7b"), layers=1, hidden=8, heads=4, kv_heads=2, vocabulary=10, sequence=3,
        experts=Experts(routed=4, top_k=2, ffn=12),
    )  # fmt: skip
    terms = layer_activations(moe)
    assert terms["router: probabilities in FP32"] == 4 * 3 * 4
    assert terms["experts: tokens dispatched"] == terms["experts: outputs to combine"] == 2 * 2 * 3 * 8
    assert terms["experts: gate, SiLU, up, product"] == 2 * 2 * 3 * 4 * 12


@pytest.mark.parametrize("name", MODELS)
def test_every_model_can_be_laid_out(name):
    one = model(name)
    sequence = 2048 if one.sequence > 2048 else one.sequence
    memory = training_memory(one, Layout(pipeline_parallel=2, zero=3, data_parallel=2), sequence=sequence)
    assert memory.total > 0 and isinstance(memory.activations, int)


def test_70_billion_parameters_do_not_fit_on_one_card_and_do_on_64():
    llama = model("llama3-70b")
    assert 2 * llama.parameters > H100.memory_bytes
    layout = Layout(data_parallel=8, tensor_parallel=8, zero=3, sequence_parallel=True)
    assert training_memory(llama, layout, sequence=4096, recompute="full").total < H100.memory_bytes


def test_world_size_is_the_product():
    """Llama Team 2024, Table 4: TP, CP, PP, DP -> GPUs."""
    rows = {8192: (8, 1, 16, 64), 16384: (8, 16, 16, 8)}
    for gpus, (tp, cp, pp, dp) in rows.items():
        layout = Layout(data_parallel=dp, tensor_parallel=tp, context_parallel=cp, pipeline_parallel=pp)
        assert layout.world_size == gpus


# ---------------------------------------------------------------- to the byte, by hand (live: test_memory_live.py)


def test_terms_beyond_the_formula_by_hand():
    shapes = {"a": (5, 3), "b": (4,)}  # 19 parameters
    assert ddp_states(shapes) == Memory(76, 76, 152, extra={"optimizer's step counters": 8, "DDP's bucket copies": 76})
    assert [rank.optimizer for rank in zero_redundancy_states(shapes, 3)] == [120, 32, 0]
    ranks = fsdp_states(shapes, 3, gathered=["a"])  # rows 2, 2, 1 of a and 2, 2, 0 of b
    assert [rank.parameters for rank in ranks] == [4 * 8, 4 * 8, 4 * 3]
    assert [rank.extra.get("padding of parameters", 0) for rank in ranks] == [0, 0, 4 * 5]
    assert {rank.extra["gathered parameters"] for rank in ranks} == {4 * 3 * 2 * 3}
    assert sum(rank.optimizer for rank in ranks) == 8 * 19


# ---------------------------------------------------------------- the value and its views

MEMORY = Memory(parameters=15e9, gradients=15e9, optimizer=90e9, extra={"<buffers>": 1})


def test_a_memory_adds_up():
    assert MEMORY.total == 120_000_000_001
    twice = MEMORY + MEMORY
    assert (twice.parameters, twice.extra) == (30_000_000_000, {"<buffers>": 2})
    assert sum([MEMORY, MEMORY]) == twice
    assert Memory(extra={"nothing": 0}) == Memory()
    assert twice.minus(MEMORY) == {name: value for name, value in MEMORY.terms().items() if value}
    assert MEMORY.minus(MEMORY) == {}
    with pytest.raises(TypeError):
        MEMORY + 1


def test_a_memory_is_a_value_that_travels():
    assert pickle.loads(pickle.dumps(MEMORY)) == MEMORY == copy.deepcopy(MEMORY)
    with pytest.raises(dataclasses.FrozenInstanceError):
        MEMORY.parameters = 1
    given = {"x": 1}
    memory = Memory(extra=given)
    given["x"] = 2
    assert memory.extra == {"x": 1}


def test_the_table_says_the_unit():
    assert str(Memory(parameters=1776, activations=24)) == (
        "purpose        bytes\nparameters   1,776 B\nactivations     24 B\ntotal        1,800 B"
    )
    assert str(MEMORY).splitlines()[-1] == "1 GB = 10^9 B"
    assert "120.0 GB" in str(MEMORY)
    assert str(Memory()).splitlines() == ["purpose  bytes", "total      0 B"]
    assert "4.7 B" in str(model_states(7, zero=3, data_parallel=3))


def test_html_is_escaped_and_has_every_row():
    page = MEMORY._repr_html_()
    assert "&lt;buffers&gt;" in page and "<buffers>" not in page
    assert page.count("<tr>") == 6 and "1 GB = 10^9 B" in page


def test_frames():
    frame = MEMORY.to_frame()
    assert frame["bytes"].to_dict() == {
        "parameters": 15_000_000_000, "gradients": 15_000_000_000, "optimizer": 90_000_000_000, "<buffers>": 1,
        "total": 120_000_000_001,
    }  # fmt: skip
    beside = side_by_side({"formula": Memory(parameters=1), "measured": MEMORY})
    assert list(beside.columns) == ["formula", "measured"]
    assert beside.loc["<buffers>"].tolist() == [0, 1]


def test_a_saved_value_shows_its_tensors():
    saved = Saved((SavedTensor((2, 3), "float32", 24), SavedTensor((1000,), "<b>", 2000)))
    assert str(saved).splitlines()[-1].split() == ["2,024", "total"]
    assert "&lt;b&gt;" in saved._repr_html_()
    assert saved.to_frame()["bytes"].sum() == saved.bytes == 2024
    assert saved.memory == Memory(activations=2024)


def test_the_figure_stacks_what_is_there_and_states_units_and_capacity():
    names = ("DDP", "ZeRO-1", "ZeRO-2", "ZeRO-3")
    memories = {name: model_states(7.5e9, zero=z, data_parallel=64) for z, name in enumerate(names)}
    memories["DDP"] += Memory(extra={"buckets": 15e9})
    figure = plots.memory_bars(memories, "ZeRO-3 leaves 1.9 GB", {"H100, 80 GB": H100.memory_bytes})
    axes = figure.axes[0]
    assert axes.get_title() == "ZeRO-3 leaves 1.9 GB"
    assert "10⁹ bytes" in axes.get_xlabel()
    assert [label.get_text() for label in axes.get_yticklabels()] == list(names)
    legend = [text.get_text() for text in axes.get_legend().get_texts()]
    assert legend == ["parameters", "gradients", "optimizer", "buckets"]
    assert len({(bar.get_facecolor(), bar.get_hatch()) for bar in axes.patches}) == 4
    ends = [float(text.get_text()) for text in axes.texts[:4]]
    assert ends == pytest.approx([135, 31.41, 16.64, 1.875], abs=0.005)
    assert axes.texts[4].get_text().strip() == "H100, 80 GB" and axes.lines[0].get_xdata()[0] == 80


@pytest.mark.parametrize(
    ("size", "capacity", "unit"),
    [
        (5_000, None, "kB per rank (1 kB = 10³ bytes)"),
        (2e6, None, "MB per rank (1 MB = 10⁶ bytes)"),
        (5_000, 80e9, "GB per"),
    ],
)
def test_the_figure_takes_the_unit_of_the_largest_of_what_it_shows(size, capacity, unit):
    figure = plots.memory_bars({"DDP": Memory(parameters=int(size))}, "Small", capacity and {"H100": capacity})
    assert figure.axes[0].get_xlabel().startswith(unit)
    assert figure.axes[0].patches[0].get_width() == size / {"k": 1e3, "M": 1e6, "G": 1e9}[unit[0]]


def test_a_figure_of_nothing_is_refused():
    with pytest.raises(ValueError, match="memories is empty"):
        plots.memory_bars({}, "Nothing")


def test_the_arithmetic_imports_without_torch_and_quickly():
    code = (
        "import sys, time; start = time.perf_counter(); import course_utils.memory as memory\n"
        "print(time.perf_counter() - start)\n"
        "from course_utils.models import model; memory.training_memory(model('gpt2-small'))\n"
        "print({'torch', 'pandas', 'matplotlib'} & set(sys.modules) or 'light')"
    )
    runs = [subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True) for _ in range(3)]
    found = [run.stdout.split() for run in runs]
    assert {light for _, light in found} == {"light"}
    assert min(float(seconds) for seconds, _ in found) < 0.3


# ---------------------------------------------------------------- bad input

LAYER = dict(sequence=8, microbatch=2, hidden=16, heads=4)
WRONG = [(0, ValueError), (-1, ValueError), (1.5, (TypeError, ValueError)), (math.nan, (TypeError, ValueError)), (True, TypeError), ("8", TypeError)]  # fmt: skip  # noqa: E501


@pytest.mark.parametrize("value, error", WRONG, ids=repr)
@pytest.mark.parametrize("name", ["sequence", "microbatch", "hidden", "heads", "layers", "tensor_parallel", "context_parallel", "value_bytes"])  # fmt: skip  # noqa: E501
def test_shapes_are_whole_numbers_of_at_least_one(name, value, error):
    with pytest.raises(error, match=f"{name}="):
        activations(**LAYER | {name: value})


@pytest.mark.parametrize("value, error", WRONG, ids=repr)
@pytest.mark.parametrize("name", ["parameters", "data_parallel"])
def test_counts_are_whole_numbers_of_at_least_one(name, value, error):
    with pytest.raises(error, match=f"{name}="):
        model_states(**{"parameters": 10} | {name: value})


@pytest.mark.parametrize("value", [-1, math.nan, math.inf, "1", None, True])
def test_bytes_are_finite_and_not_negative(value):
    for given in ({"parameters": value}, {"extra": {"buffers": value}}):
        with pytest.raises((TypeError, ValueError), match="(parameters|buffers)="):
            Memory(**given)


LLAMA = model("llama3-8b")
SENTENCES = {
    "zero=4": lambda: model_states(10, zero=4),
    "zero=True": lambda: model_states(10, zero=True),
    "zero=1: DeepSpeed's": lambda: deepspeed_states(10, zero=1),
    "zero=5": lambda: Layout(zero=5),
    "matrices=11 is more than parameters=10": lambda: model_states(10, matrices=11),
    "optimizer='adam': an Optimizer": lambda: model_states(10, optimizer="adam"),
    "precision='bf16': a Precision": lambda: model_states(10, precision="bf16"),
    "parameters=inf": lambda: model_states(math.inf),
    "largest_layer=-1": lambda: deepspeed_states(10, zero=3, largest_layer=-1),
    "moments=0.5": lambda: Optimizer("half", 0.5),
    "bytes_per_moment=nan": lambda: Optimizer("nan", 1, bytes_per_moment=math.nan),
    "gradients=-2": lambda: Precision("negative", 2, -2, 4),
    "heads=3 does not divide hidden=16": lambda: activations(**LAYER | {"heads": 3}),
    "tensor_parallel=3 does not divide heads=4": lambda: activations(**LAYER, tensor_parallel=3),
    "context_parallel=3 does not divide sequence=8": lambda: activations(**LAYER, context_parallel=3),
    "tensor_parallel=4 does not divide sequence=2": lambda: activations(
        2, 1, 16, 4, tensor_parallel=4, sequence_parallel=True
    ),
    "recompute='some': one of none, selective, full": lambda: activations(**LAYER, recompute="some"),
    "sequence_parallel=1: True or False": lambda: activations(**LAYER, sequence_parallel=1),
    "stage=4 is not in a pipeline": lambda: in_flight(4, stage=4),
    "microbatches=0": lambda: in_flight(4, 0),
    "chunks=2 needs pipeline_parallel": lambda: in_flight(1, chunks=2),
    "pipeline_parallel=4 does not divide microbatches=6": lambda: in_flight(4, 6, chunks=2),
    "pipeline_parallel=33 is more than layers=32": lambda: training_memory(LLAMA, Layout(pipeline_parallel=33)),
    "layers=0": lambda: stage_layers(0, 1),
    "stage=-1": lambda: stage_layers(4, 2, -1),
    "stage=2 is not in a pipeline of 2": lambda: training_memory(LLAMA, Layout(pipeline_parallel=2), stage=2),
    "tensor_parallel=3 does not divide heads=32": lambda: training_memory(LLAMA, Layout(tensor_parallel=3)),
    "expert_parallel=2, and llama3-8b has no": lambda: training_memory(LLAMA, Layout(2, expert_parallel=2)),
    "expert_parallel=16 does not divide routed experts=8": lambda: held_parameters(
        model("mixtral-8x7b"), Layout(16, expert_parallel=16)
    ),
    "expert_parallel=3 does not divide data_parallel": lambda: Layout(data_parallel=4, expert_parallel=3),
    "data_parallel=0": lambda: Layout(data_parallel=0),
    "chunks=0": lambda: Layout(chunks=0),
    "pipeline_parallel × chunks=12 does not divide layers=32": lambda: training_memory(
        LLAMA, Layout(pipeline_parallel=4, chunks=3)
    ),
    "needs tensor_parallel of at least 2": lambda: Layout(sequence_parallel=True),
    "model='llama3-70b': a Model": lambda: training_memory("llama3-70b"),
    "layout=8: a Layout": lambda: training_memory(LLAMA, 8),
    "layer=32: llama3-8b has": lambda: layer_activations(LLAMA, 32),
    "context_parallel=3 does not divide sequence=8192": lambda: training_memory(LLAMA, Layout(context_parallel=3)),
    "shapes='ab'": lambda: ddp_states("ab"),
    "shapes is empty": lambda: ddp_states([]),
    "is a list: a tuple": lambda: ddp_states([[3, 4]]),
    "a length in a shape=0": lambda: zero_redundancy_states([(0, 4)], 2),
    "world_size=0": lambda: zero_redundancy_states([(3, 4)], 0),
    "world_size=2.0": lambda: fsdp_states([(3, 4)], 2.0),
    "a parameter has no dimensions": lambda: fsdp_states([()], 2),
    "gathered names ['x']": lambda: fsdp_states({"w": (3, 4)}, 2, gathered=["x"]),
    "mask_bytes=0": lambda: torch_terms(8, 2, 16, 4, mask_bytes=0),
    "extra has a term named 'total'": lambda: Memory(extra={"total": 1}),
    "extra=3: a mapping": lambda: Memory(extra=3),
    "minus(3): a Memory": lambda: Memory().minus(3),
    "side_by_side: 'a' is a int": lambda: side_by_side({"a": 1}),
    "side_by_side([])": lambda: side_by_side([]),
}


@pytest.mark.parametrize("sentence", SENTENCES)
def test_bad_input_is_refused_by_a_sentence_that_names_it(sentence):
    with pytest.raises((TypeError, ValueError)) as caught:
        SENTENCES[sentence]()
    assert sentence in str(caught.value)
