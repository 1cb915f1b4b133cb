"""Models: exact parameter counts from shapes, against published counts, counts by hand, and torch itself."""

import copy
import dataclasses
import math
import subprocess
import sys

import cloudpickle
import pytest
import torch

from course_utils import hardware, launch
from course_utils.hardware import A100, B200, H100, H200, V100
from course_utils.memory import fused_attention, transformer_layer, unfused_attention
from course_utils.models import KORTHIKANTI, MODELS, ZERO_SIZES, Experts, Model, Weight, gpt, model, small_gpt

# Counts of the checkpoints of these configurations (openai-community/gpt2*, meta-llama, mistralai); exact.
PUBLISHED = {
    "gpt2-small": 124_439_808,
    "gpt2-medium": 354_823_168,
    "gpt2-large": 774_030_080,
    "gpt2-xl": 1_557_611_200,
    "gpt3": 174_604_259_328,  # by the formula V h + T h + L (12 h² + 13 h) + 2 h on Brown et al. 2020, Table 2.1
    "llama2-7b": 6_738_415_616,
    "llama2-13b": 13_015_864_320,
    "llama2-70b": 68_976_648_192,
    "llama3-8b": 8_030_261_248,
    "llama3-70b": 70_553_706_496,
    "llama3-405b": 405_853_388_800,
    "mixtral-8x7b": 46_702_792_704,
    "deepseek-v3": 671_026_419_200,
}


@pytest.mark.parametrize("name", PUBLISHED)
def test_parameter_counts_are_the_published_ones_exactly(name):
    assert model(name).parameters == PUBLISHED[name]
    assert sum(model(name).parameter_terms().values()) == PUBLISHED[name]


def test_gpt_by_another_formula():
    """V h + T h + L (12 h² + 13 h) + 2 h, as nanoGPT's README counts and Narayanan et al. 2021, Eq. 2 approximates."""
    for one in (one for one in MODELS.values() if one.gpt):
        h = one.hidden
        assert one.parameters == (one.vocabulary + one.sequence) * h + one.layers * (12 * h * h + 13 * h) + 2 * h


def test_llama_by_another_formula():
    """L (2 h² + 2 h kv d + 3 h f + 2 h) + 2 V h + h, with kv key heads of d = h / heads."""
    for one in (one for name, one in MODELS.items() if name.startswith("llama")):
        h, keys = one.hidden, one.kv_heads * one.hidden // one.heads
        layer = 2 * h * h + 2 * h * keys + 3 * h * one.ffn + 2 * h
        assert one.parameters == one.layers * layer + 2 * one.vocabulary * h + h


def test_active_parameters_of_mixtures():
    assert model("mixtral-8x7b").active_parameters == 12_879_925_248
    # DeepSeek-V3 with both embeddings and without the 14,848 routing biases; without the input's embedding 36.6 B:
    # sums over its configuration made apart from this code
    deepseek = model("deepseek-v3")
    assert deepseek.active_parameters == 37_552_282_624
    assert deepseek.active_parameters - deepseek.vocabulary * deepseek.hidden == 36_625_603_584
    assert model("llama3-8b").active_parameters == model("llama3-8b").parameters


def test_deepseek_v3_term_by_term():
    """DeepSeek-AI 2024, arXiv 2412.19437, Section 4.2, and its inference configuration."""
    deepseek = model("deepseek-v3")
    terms = deepseek.parameter_terms()
    assert terms["experts"] == 653_908_770_816
    assert terms["attention"] == 61 * 187_107_328
    assert terms["routing bias"] == 58 * 256 == 14_848
    assert [
        layer
        for layer in range(61)
        if any(w.part == "mlp" and w.shape[0] == 18432 for w in deepseek.layer_weights(layer))
    ] == [0, 1, 2]  # the dense layers


# Narayanan et al. 2021, arXiv 2104.04473, Table 1: billions of parameters, heads, hidden, layers; V=51200, s=2048
NARAYANAN = [
    (1.7, 24, 2304, 24), (3.6, 32, 3072, 30), (7.5, 32, 4096, 36), (18.4, 48, 6144, 40), (39.1, 64, 8192, 48),
    (76.1, 80, 10240, 60), (145.6, 96, 12288, 80), (310.1, 128, 16384, 96), (529.6, 128, 20480, 105),
    (1008.0, 160, 25600, 128),
]  # fmt: skip


@pytest.mark.parametrize("billions, heads, hidden, layers", NARAYANAN)
def test_the_models_of_narayanan_et_al(billions, heads, hidden, layers):
    counted = gpt(layers, hidden, heads, vocabulary=51200, sequence=2048).parameters
    assert counted / 1e9 == pytest.approx(billions, abs=0.05)
    # their Eq. 2, which leaves out the final LayerNorm
    equation = 12 * layers * hidden**2 * (1 + 13 / (12 * hidden) + (51200 + 2048) / (12 * layers * hidden))
    assert counted - 2 * hidden == pytest.approx(equation, rel=1e-12)


def test_the_runs_of_korthikanti_et_al():
    """Korthikanti et al. 2022, arXiv 2205.05198, Table 3: heads, hidden, layers, TP, PP, GPUs, batch, micro-batch."""
    table = {
        "22B": (64, 6144, 48, 8, 1, 8, 4, 4),
        "175B": (96, 12288, 96, 8, 8, 64, 64, 1),
        "530B": (128, 20480, 105, 8, 35, 280, 280, 1),
        "1T": (160, 25600, 128, 8, 64, 512, 512, 1),
    }
    found = {
        name: (
            run.model.heads, run.model.hidden, run.model.layers, run.tensor_parallel, run.pipeline_parallel,
            run.world_size, run.batch, run.microbatch,
        )
        for name, run in KORTHIKANTI.items()
    }  # fmt: skip
    assert found == table
    assert all((run.model.sequence, run.model.vocabulary) == (2048, 51200) for run in KORTHIKANTI.values())
    billions = [run.model.parameters / 1e9 for run in KORTHIKANTI.values()]
    assert billions == pytest.approx([22, 175, 530, 1000], rel=0.02)


def test_the_sizes_of_the_zero_paper():
    assert list(ZERO_SIZES.values()) == [7.5e9, 128e9, 1e12]


def test_every_model_names_its_source():
    assert all(one.source and one.name == name for name, one in MODELS.items())


# ---------------------------------------------------------------- bad input


def test_an_unknown_model_is_refused_with_the_names():
    with pytest.raises(ValueError, match=r"no model 'llama4' here: choose one of gpt2-small, .*deepseek-v3"):
        model("llama4")
    with pytest.raises(TypeError, match="the name of a model"):
        model(70)


GOOD = dict(name="x", layers=2, hidden=8, heads=2, ffn=16, vocabulary=10, sequence=4)


@pytest.mark.parametrize("name", ("layers", "hidden", "heads", "ffn", "vocabulary", "sequence"))
@pytest.mark.parametrize("value, error", [(0, ValueError), (-1, ValueError), (2.0, TypeError), (math.nan, TypeError)])
def test_sizes_are_whole_numbers_of_at_least_one(name, value, error):
    with pytest.raises(error, match=f"{name}="):
        Model(**GOOD | {name: value})


@pytest.mark.parametrize(
    "change, sentence",
    [
        ({"heads": 3}, "heads=3 does not divide hidden=8"),
        ({"kv_heads": 4}, "kv_heads=4 does not divide heads=2"),
        ({"positions": -1}, "positions=-1"),
        ({"gpt": True}, "ffn=16: a GPT here has 4 × hidden, 32"),
        ({"layers": True}, "layers=True"),
    ],
)
def test_shapes_that_do_not_work_out_are_refused(change, sentence):
    with pytest.raises((TypeError, ValueError), match=sentence):
        Model(**GOOD | change)


def test_models_are_values():
    with pytest.raises(dataclasses.FrozenInstanceError):
        model("gpt3").layers = 1
    assert Weight("w", "experts", (3, 2), copies=4).parameters == 24
    assert Experts(4, 1, 8) == Experts(routed=4, top_k=1, ffn=8)


# ---------------------------------------------------------------- the small GPT


@pytest.mark.parametrize("layers, hidden, heads, vocabulary, sequence", [(1, 4, 1, 7, 3), (2, 64, 4, 100, 32)])
@pytest.mark.parametrize("tied", (True, False))
def test_the_small_gpt_has_the_parameters_of_the_arithmetic(layers, hidden, heads, vocabulary, sequence, tied):
    module = small_gpt(layers, hidden, heads, vocabulary, sequence, tied=tied)
    shape = gpt(layers, hidden, heads, vocabulary, sequence, tied=tied)
    assert sum(parameter.numel() for parameter in module.parameters()) == shape.parameters
    assert sum(parameter.numel() for parameter in transformer_layer(hidden, heads).parameters()) == sum(
        weight.parameters for weight in shape.layer_weights(0)
    )


def test_gpt2_small_in_torch():
    with torch.device("meta"):
        module = small_gpt(12, 768, 12, 50257, 1024)
    assert sum(parameter.numel() for parameter in module.parameters()) == 124_439_808


def test_the_small_gpt_is_causal_and_learns():
    torch.manual_seed(0)
    module = small_gpt(layers=2, hidden=32, heads=4, vocabulary=11, sequence=8)
    tokens = torch.randint(11, (4, 8))
    logits = module(tokens)
    assert logits.shape == (4, 8, 11)
    changed = tokens.clone()
    changed[:, 5] = (changed[:, 5] + 1) % 11
    assert torch.equal(module(changed)[:, :5], logits[:, :5])  # the future is not seen
    assert not torch.equal(module(changed)[:, 5], logits[:, 5])
    optimizer = torch.optim.Adam(module.parameters(), lr=1e-2)
    losses = []
    for _ in range(30):
        loss = torch.nn.functional.cross_entropy(module(tokens[:, :-1]).flatten(0, 1), tokens[:, 1:].flatten())
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    assert losses[0] == pytest.approx(math.log(11), abs=0.2)  # it starts knowing nothing
    assert losses[-1] < 0.2


def test_the_small_gpt_can_be_copied_and_sent_to_ranks():
    module = small_gpt(layers=1, hidden=8, heads=2, vocabulary=10, sequence=4)
    tokens = torch.arange(4)[None]
    sent, copied = cloudpickle.loads(cloudpickle.dumps(module)), copy.deepcopy(module)
    assert torch.equal(sent(tokens), module(tokens)) and torch.equal(copied(tokens), module(tokens))
    assert sent.head.weight is sent.token.weight  # still tied
    assert launch(lambda: module(tokens), world_size=1)[0].equal(module(tokens))


def test_fused_and_unfused_attention_agree():
    torch.manual_seed(0)
    q, k, v = torch.randn(3, 2, 4, 8, 16)
    torch.testing.assert_close(unfused_attention(q, k, v, 0.0), fused_attention(q, k, v, 0.0))


def test_in_eval_the_layer_drops_nothing():
    layer = transformer_layer(8, 2, dropout=0.5).eval()
    x = torch.randn(1, 3, 8)
    assert torch.equal(layer(x), layer(x))
    assert not torch.equal(layer.train()(x), layer(x))


@pytest.mark.parametrize(
    "call, sentence",
    [
        (lambda: small_gpt(0, 8, 2, 10, 4), "layers=0: at least 1"),
        (lambda: small_gpt(1, 8, 3, 10, 4), "heads=3 does not divide hidden=8"),
        (lambda: small_gpt(1, 8, 2, 10, 4.0), "sequence=4.0: a whole number"),
        (lambda: transformer_layer(8, 3), "heads=3 does not divide hidden=8"),
        (lambda: transformer_layer(8, 2, dropout=1.0), "dropout=1.0: a probability"),
        (lambda: transformer_layer(8, 2, attention_dropout=math.nan), "attention_dropout=nan: a probability"),
        (lambda: transformer_layer(8, 2, attention="flash"), "attention='flash': a function"),
    ],
)
def test_modules_that_cannot_be_are_refused(call, sentence):
    with pytest.raises((TypeError, ValueError), match=sentence):
        call()


# ---------------------------------------------------------------- hardware


def test_accelerators_are_as_tabulated():
    """Dense BF16 (V100: FP16) and FP8 TFLOP/s, GB, TB/s: vendor figures as tabulated in stas00/ml-engineering."""
    table = {
        V100: (125, None, 32, 0.9),
        A100: (312, None, 80, 2.0),
        H100: (989, 1979, 80, 3.35),
        H200: (989, 1979, 141, 4.8),
        B200: (2250, 4500, 180, 8.0),
    }
    assert set(table) == set(hardware.ACCELERATORS)
    for one, (flops, fp8, gigabytes, terabytes_per_second) in table.items():
        assert one.peak_flops("fp16") == flops * 1e12
        assert one.bf16_flops in (None if one is V100 else flops * 1e12,)
        assert one.fp8_flops == (fp8 and fp8 * 1e12)
        assert one.memory_bytes == gigabytes * 10**9
        assert one.memory_bytes_per_second == terabytes_per_second * 1e12


def test_links_are_as_tabulated():
    """GB/s in one direction (stas00/ml-engineering); microseconds of NCCL's src/graph/tuning.cc, LL, LL128, Simple."""
    nvlink = {V100: 150, A100: 300, H100: 450, H200: 450, B200: 900}
    assert {one: one.link.bytes_per_second / 1e9 for one in hardware.ACCELERATORS} == nvlink
    pcie = (hardware.PCIE_4, hardware.PCIE_5, hardware.PCIE_6)
    assert [link.bytes_per_second / 1e9 for link in pcie] == [31, 63, 121]
    infiniband = [getattr(hardware, f"INFINIBAND_{name}") for name in ("EDR", "HDR", "NDR", "XDR")]
    assert [8 * link.bytes_per_second / 1e9 for link in infiniband] == [100, 200, 400, 800]
    tuner = {
        hardware.NVLINK_H100: {"tree": (0.6, 1.25, 4.0), "ring": (0.6, 1.9, 3.4)},
        hardware.INFINIBAND_NDR: {"tree": (5.0, 8.5, 14.0), "ring": (2.7, 4.0, 14.0)},
    }
    for link, rows in tuner.items():
        for algorithm, microseconds in rows.items():
            found = [link.latency(algorithm, protocol) * 1e6 for protocol in ("LL", "LL128", "Simple")]
            assert found == pytest.approx(microseconds)


def test_everything_names_its_source():
    assert all(one.source for one in (*hardware.ACCELERATORS, *hardware.LINKS))


def test_what_is_not_there_is_refused_with_what_is():
    with pytest.raises(ValueError, match="V100 SXM 32 GB has no peak rate for 'bf16': it has fp16"):
        V100.peak_flops("bf16")
    with pytest.raises(ValueError, match="no peak rate for 'fp4': it has fp16, bf16, fp8"):
        H100.peak_flops("fp4")
    with pytest.raises(
        ValueError, match="NVLink of an H100 has no latency for 'ring' with 'simple': .*ring with Simple"
    ):
        hardware.NVLINK_H100.latency("ring", "simple")
    with pytest.raises(ValueError, match="PCIe 5.0 x16 has no latency .* NCCL's tuner has none"):
        hardware.PCIE_5.latency("ring", "Simple")


def test_models_and_hardware_need_no_torch():
    code = "import sys, course_utils.models, course_utils.hardware as h; h.H100; print('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], capture_output=True, text=True).stdout.strip() == "False"
