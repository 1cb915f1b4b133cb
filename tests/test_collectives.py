"""Collectives: costs and algorithms against published numbers, live timing on ranks, the command under torchrun.

Published values are copied here with their sources. p is the number of ranks, n the size in bytes.
"""

import os
import subprocess
import sys
import time
from fractions import Fraction
from functools import partial

import numpy as np
import pytest
import torch
import torch.distributed as dist

from course_utils import World, launch
from course_utils.collectives import (
    OPERATIONS,
    Cost,
    Timing,
    Timings,
    algorithm_bandwidth,
    bus_bandwidth,
    bus_factor,
    copy_bandwidth,
    costs,
    crossover,
    fit,
    simulate,
    time_collective,
)

# ---------------------------------------------------------------- costs


# Source: Thakur, Rabenseifner, Gropp 2005; the ring: Patarasuk, Yuan 2009. Coefficients of α and of n·β at p = 8, from
# these formulas: ring 2(p-1)α + 2(p-1)/p nβ; recursive doubling log2 p (α + nβ); Rabenseifner 2 log2 p α + 2(p-1)/p nβ;
# broadcast tree ceil(log2 p)(α + nβ); all-gather ring (p-1)α + (p-1)/p nβ. The pairwise all-to-all is printed as
# (p-1)α + nβ, with n all that is sent; of an array of n bytes a rank keeps 1/p, as in nccl-tests.
@pytest.mark.parametrize(
    ("cost", "steps", "per_byte"),
    [
        (costs.ring_all_reduce, 14, 1.75),
        (costs.recursive_doubling_all_reduce, 3, 3),
        (costs.rabenseifner_all_reduce, 6, 1.75),
        (costs.tree_broadcast, 3, 3),
        (costs.tree_reduce, 3, 3),
        (costs.tree_all_reduce, 6, 6),
        (costs.ring_all_gather, 7, 0.875),
        (costs.ring_reduce_scatter, 7, 0.875),
        (costs.pairwise_all_to_all, 7, 0.875),
        (costs.naive_ring_all_reduce, 7, 7),
        (costs.tree_scatter, 3, 0.875),
        (costs.tree_gather, 3, 0.875),
    ],
)
def test_published_costs_on_eight_ranks(cost, steps, per_byte):
    assert cost(8_000_000, 8) == Cost(steps, per_byte * 8_000_000)
    assert cost(8_000_000, 1) == Cost(0, 0)  # alone, there is nobody to send to
    assert cost(0, 8) == Cost(steps, 0)


def test_seconds_are_steps_alpha_plus_bytes_beta():
    # 14 steps of 10 µs and 1.75 · 8 MB at 10 GB/s: 140 µs + 1400 µs
    assert costs.ring_all_reduce(8_000_000, 8).seconds(10e-6, 1e-10) == pytest.approx(1540e-6)
    assert costs.send(1000).seconds(1.0, 0.001) == pytest.approx(2.0)
    assert costs.barrier(6) == Cost(3, 0)
    assert costs.send(5) + costs.send(7) == Cost(2, 12)


@pytest.mark.parametrize("p", range(2, 17))
def test_the_naive_ring_moves_half_p_times_as_much_as_the_ring(p):
    naive, ring = costs.naive_ring_all_reduce(240, p), costs.ring_all_reduce(240, p)
    assert Fraction(naive.bytes) / Fraction(ring.bytes) == Fraction(p, 2)


def test_a_share_that_is_no_whole_number_of_bytes_stays_exact():
    assert costs.ring_all_gather(16, 3).bytes == Fraction(32, 3)
    assert isinstance(costs.ring_all_gather(15, 3).bytes, int)


def test_crossings_by_hand():
    """p = 8, α = 10 µs, β = 0.1 ns: ring 140 µs + 1.75 nβ; recursive doubling 30 µs + 3 nβ; tree 60 µs + 6 nβ."""
    where = partial(crossover, ranks=8, alpha=10e-6, beta=1e-10)
    assert where(costs.ring_all_reduce, costs.recursive_doubling_all_reduce) == pytest.approx(110e-6 / (1.25 * 1e-10))
    assert where(costs.recursive_doubling_all_reduce, costs.ring_all_reduce) == pytest.approx(880_000)
    assert where(costs.ring_all_reduce, costs.tree_all_reduce) == pytest.approx(80e-6 / (4.25 * 1e-10))
    assert where(costs.tree_all_reduce, costs.recursive_doubling_all_reduce) is None  # the tree always takes longer
    assert where(costs.rabenseifner_all_reduce, costs.ring_all_reduce) is None  # same bytes, fewer steps
    size = where(costs.ring_all_reduce, costs.tree_all_reduce)
    below, above = (
        [cost(int(size * f), 8).seconds(10e-6, 1e-10) for cost in (costs.tree_all_reduce, costs.ring_all_reduce)]
        for f in (0.9, 1.1)
    )
    assert below[0] < below[1] and above[0] > above[1]


def test_hierarchy_counts_each_kind_of_link():
    """8 GPUs a node, 2 nodes, 16 MB. Inside 2·7 steps and 2·7/8·16 MB; between 2 steps and 2·1/2·(16/8 MB)."""
    two_levels = costs.hierarchical_all_reduce(16_000_000, ranks_per_node=8, nodes=2)
    assert two_levels.inside == Cost(14, 28_000_000)
    assert two_levels.between == Cost(2, 2_000_000)
    shared = costs.hierarchical_all_reduce(16_000_000, ranks_per_node=8, nodes=2, links_per_node=1)
    assert shared.between == Cost(2, 16_000_000)  # eight rings of 2 MB each over one link
    # H100: NVLink 450 GB/s (stas00/ml-engineering), InfiniBand NDR 400 Gbit/s = 50 GB/s; latencies of a few µs.
    nvlink, ndr = (3.4e-6, 1 / 450e9), (14e-6, 1 / 50e9)
    flat = costs.ring_all_reduce(16_000_000, 16).seconds(*ndr)
    assert two_levels.seconds(nvlink, ndr) < flat / 4
    assert costs.hierarchical_all_reduce(64, 8, nodes=1).between == Cost(0, 0)
    assert costs.hierarchical_all_reduce(64, 1, nodes=8).inside == Cost(0, 0)


# ---------------------------------------------------------------- bandwidth


# Source: NVIDIA nccl-tests, doc/PERFORMANCE.md, "Summary".
@pytest.mark.parametrize(
    ("operation", "factor"),
    [
        ("all_reduce", lambda n: 2 * (n - 1) / n),
        ("reduce_scatter", lambda n: (n - 1) / n),
        ("all_gather", lambda n: (n - 1) / n),
        ("all_to_all", lambda n: (n - 1) / n),
        ("broadcast", lambda n: 1),
        ("reduce", lambda n: 1),
    ],
)
def test_bus_factors_of_nccl_tests(operation, factor):
    for n in (1, 2, 3, 8, 1024):
        assert bus_factor(operation, n) == pytest.approx(factor(n))


def test_bandwidths_by_hand():
    assert algorithm_bandwidth(3_000_000, 1.5) == 2e6
    assert bus_bandwidth("all_reduce", 3_000_000, 8, 1.5) == 3.5e6
    # A line of a published run on 8 A100 (li-plus/playground, nccl.md): 1 GiB, 5499.4 µs -> algbw 195.25 GB/s
    assert algorithm_bandwidth(1_073_741_824, 5499.4e-6) == pytest.approx(195.25e9, rel=1e-4)


def test_the_memory_of_this_machine_copies_at_a_plausible_speed():
    assert 5e7 < copy_bandwidth(2**24, repeats=3) < 2e12  # bytes per second


# ---------------------------------------------------------------- simulation

ALGORITHMS = {
    simulate.ring_all_reduce: costs.ring_all_reduce,
    simulate.naive_ring_all_reduce: costs.naive_ring_all_reduce,
    simulate.recursive_doubling_all_reduce: costs.recursive_doubling_all_reduce,
    simulate.tree_all_reduce: costs.tree_all_reduce,
}


@pytest.mark.parametrize("algorithm", ALGORITHMS, ids=lambda f: f.__name__)
@pytest.mark.parametrize("p", range(1, 10))
def test_every_rank_ends_with_the_sum_and_the_count_is_the_formula(algorithm, p):
    tensors = np.random.default_rng(p).integers(-1000, 1000, (p, 4 * p))
    run = algorithm(tensors)
    for values in run.result:
        np.testing.assert_array_equal(values, tensors.sum(axis=0))
    assert run.cost == ALGORITHMS[algorithm](tensors[0].nbytes, p)
    everybody = tuple(range(p))
    assert all(held == everybody for held in (run.steps or [run.start])[-1].holds[0])
    np.testing.assert_array_equal(run.start.values, tensors)


def test_the_ring_takes_14_steps_on_8_ranks_and_each_rank_sends_2_7_8_of_its_data():
    run = simulate.ring_all_reduce(np.ones((8, 64)))  # 512 bytes a rank
    assert len(run.steps) == 14
    assert run.sent == (896,) * 8  # 2 · 7/8 · 512
    for step in run.steps:
        assert [(m.source, m.target) for m in step.messages] == [(r, (r + 1) % 8) for r in range(8)]
    assert [len(step.holds[3][3]) for step in run.steps[:7]] == [1, 1, 1, 1, 1, 1, 8]
    assert simulate.naive_ring_all_reduce(np.ones((8, 64))).sent == (8 // 2 * 896,) * 8


def test_after_half_the_ring_each_rank_holds_its_own_slice_of_the_sum():
    """The example of the course: four ranks, eight numbers, rank r adds 10 r; rank 2 gets 76 and 80."""
    run = simulate.ring_all_reduce([np.arange(8.0) + 10 * r for r in range(4)])
    half = run.steps[2]
    assert half.values[2][4:6].tolist() == [76.0, 80.0]
    assert all(half.holds[r][r] == (0, 1, 2, 3) for r in range(4))
    assert sum(len(held) == 4 for rank in half.holds for held in rank) == 4


def test_uneven_slices_still_give_the_sum():
    run = simulate.ring_all_reduce(np.arange(9.0).reshape(3, 3).repeat(3, axis=1)[:, :7])
    assert run.result[0].tolist() == run.result[2].tolist() == [9.0] * 3 + [12.0] * 3 + [15.0]
    assert simulate.ring_all_reduce(np.ones((4, 2))).result[3].tolist() == [4.0, 4.0]  # two slices are empty


def test_replicas_of_the_naive_ring_can_differ_in_the_last_bit_and_those_of_the_ring_never():
    tensors = np.random.default_rng(0).standard_normal((4, 1000)).astype(np.float32)
    naive, ring = simulate.naive_ring_all_reduce(tensors).result, simulate.ring_all_reduce(tensors).result
    assert any((naive[0] != other).any() for other in naive[1:])
    assert all((ring[0] == other).all() for other in ring[1:])
    np.testing.assert_allclose(naive[0], ring[0], rtol=1e-3, atol=1e-5)


@pytest.mark.parametrize("algorithm", ALGORITHMS, ids=lambda f: f.__name__)
@pytest.mark.parametrize("p", [2, 5, 8])
def test_a_run_on_links_lasts_as_long_as_the_formula_says(algorithm, p):
    run = algorithm(np.ones((p, 4 * p)))
    timeline = run.timeline(alpha=3e-6, beta=1e-9)
    assert timeline.makespan == pytest.approx(ALGORITHMS[algorithm](32 * p, p).seconds(3e-6, 1e-9))
    assert timeline.ranks == tuple(range(p))
    assert timeline.seconds() == pytest.approx(dict.fromkeys(range(p), timeline.makespan))


def test_a_run_is_a_table_of_messages_and_leaves_its_input_alone():
    tensors = np.ones((4, 8))
    run = simulate.tree_all_reduce(tensors)
    frame = run.to_frame()
    assert len(frame) == 6 and frame["step"].tolist() == [1, 1, 2, 3, 4, 4]  # 3 sends up, 3 down
    assert frame["carries"].tolist()[:3] == [(1,), (3,), (2, 3)]
    assert tensors.tolist() == np.ones((4, 8)).tolist()
    with pytest.raises(ValueError, match="read-only"):
        run.result[0][0] = 7


# ---------------------------------------------------------------- fitting


def test_the_fit_returns_what_was_put_in():
    sizes = [2**k for k in range(10, 27, 2)]
    exact = [costs.ring_all_reduce(size, 4).seconds(25e-6, 0.8e-9) for size in sizes]
    found = fit(sizes, exact, partial(costs.ring_all_reduce, ranks=4))
    assert found.alpha == pytest.approx(25e-6) and found.beta == pytest.approx(0.8e-9)
    assert found.bandwidth == pytest.approx(1.25e9)
    assert found.r_squared == pytest.approx(1.0) and max(map(abs, found.residuals)) < 1e-9
    assert found.predict(2**28) == pytest.approx(costs.ring_all_reduce(2**28, 4).seconds(25e-6, 0.8e-9))


def test_the_fit_agrees_with_the_normal_equations_solved_in_fractions():
    """x = 1, 2, 4, y = 2, 3, 4 with weights 1/y²: an independent computation, exact."""
    x, y = [Fraction(v) for v in (1, 2, 4)], [Fraction(v) for v in (2, 3, 4)]
    w = [1 / v**2 for v in y]
    s0, s1, s2 = (sum(wi * xi**k for wi, xi in zip(w, x)) for k in (0, 1, 2))
    t0, t1 = (sum(wi * xi**k * yi for wi, xi, yi in zip(w, x, y)) for k in (0, 1))
    det = s0 * s2 - s1**2
    alpha, beta = (s2 * t0 - s1 * t1) / det, (s0 * t1 - s1 * t0) / det
    spread = sum(wi * (alpha + beta * xi - yi) ** 2 for wi, xi, yi in zip(w, x, y))  # over 3 - 2 degrees of freedom
    found = fit([1, 2, 4], [2.0, 3.0, 4.0])
    assert (found.alpha, found.beta) == pytest.approx((float(alpha), float(beta)))
    assert found.alpha_error == pytest.approx(float(spread * s2 / det) ** 0.5)
    assert found.beta_error == pytest.approx(float(spread * s0 / det) ** 0.5)


def test_the_uncertainty_covers_the_truth_about_as_often_as_it_says():
    """Two standard errors with seven degrees of freedom should hold 91 % of the time (Student's t)."""
    sizes = [2**k for k in range(10, 27, 2)]
    truth = np.array([costs.send(size).seconds(50e-6, 1e-9) for size in sizes])
    noise = np.random.default_rng(1).normal(1, 0.05, (400, len(sizes)))
    fits = [fit(sizes, truth * factors) for factors in noise]
    for name, value in (("alpha", 50e-6), ("beta", 1e-9)):
        inside = np.mean([abs(getattr(f, name) - value) < 2 * getattr(f, f"{name}_error") for f in fits])
        assert 0.85 < inside < 0.97


def test_a_large_time_does_not_drown_the_small_ones():
    """An error of 10 % at 64 MiB leaves α alone; unweighted least squares would miss it by more than 100 %."""
    sizes = [2**k for k in range(10, 27, 2)]
    times = np.array([costs.send(size).seconds(50e-6, 1e-9) for size in sizes])
    times[-1] *= 1.1
    assert fit(sizes, times).alpha == pytest.approx(50e-6, rel=0.05)
    unweighted = np.polyfit(sizes, times, 1)[1]
    assert abs(unweighted / 50e-6 - 1) > 1


def test_the_fit_reads_as_a_sentence():
    text = str(fit([1000, 2000, 3000, 4000], [11e-6, 12.1e-6, 12.9e-6, 14e-6]))
    assert text.startswith("α = 10.") and "µs per step" in text and "GB/s" in text and "±" in text


# ---------------------------------------------------------------- live


def test_every_operation_is_timed_and_its_result_is_right():
    with World(2) as world:
        for operation in OPERATIONS:
            factor = 1 if operation in ("all_reduce", "broadcast", "reduce") else 0.5  # nccl-tests, two ranks
            tables = world.run(time_collective, operation, [8, 1000, 4096], repeats=3)
            assert tables[0] == tables[1]
            assert tables[0].sizes == (8, 1000, 4096)
            for row in tables[0]:
                assert (row.operation, row.ranks, row.wrong) == (operation, 2, 0)
                assert 0 < row.fastest <= row.seconds <= row.slowest
                assert row.algbw == pytest.approx(row.size / row.seconds)
                assert row.busbw == pytest.approx(row.algbw * factor)


@pytest.mark.parametrize("ranks", [1, 3])
def test_other_numbers_of_ranks_and_sizes_that_do_not_divide(ranks):
    with World(ranks) as world:
        for operation in OPERATIONS:
            table = world.run(time_collective, operation, [100], repeats=1, warmup=0)[0]
            in_slices = operation in ("reduce_scatter", "all_gather", "all_to_all")
            assert table.sizes == ((96,) if ranks == 3 and in_slices else (100,))  # 25 floats, or 3 times 8 of them
            assert [row.wrong for row in table] == [0]


def test_the_slowest_rank_counts_and_the_median_of_the_repetitions():
    def slow():
        calls = []

        def all_reduce(x):
            dist.all_reduce(x)
            calls.append(x)
            time.sleep(0.05 * dist.get_rank() * (2 if len(calls) == 3 else 1))

        return time_collective(all_reduce, [64], warmup=0, repeats=3)

    (row,) = launch(slow, world_size=2)[0]
    assert 0.05 <= row.fastest <= row.seconds < 0.095
    assert 0.1 <= row.slowest < 0.2


def test_the_readers_own_functions_are_timed_and_wrong_ones_are_found_out():
    def ring(x):
        """Two ranks: swap and add."""
        rank, other = dist.get_rank(), torch.empty_like(x)
        works = [dist.isend(x.clone(), 1 - rank), dist.irecv(other, 1 - rank)]
        for work in works:
            work.wait()
        return x + other

    def forgets_the_last(x):
        dist.all_reduce(x[:-1])

    def gather(output, input):
        dist.all_gather_single(output, input)

    def all_of_them():
        return (
            time_collective(ring, [64], repeats=2),
            time_collective(forgets_the_last, [64], repeats=2),
            time_collective(gather, [64], repeats=2, operation="all_gather"),
            time_collective(lambda x, root: dist.broadcast(x, root), [64], repeats=2, operation="broadcast"),
            time_collective(lambda x: x[:3], [64], repeats=2),
            time_collective(lambda output, input: None, [64], repeats=2, operation="all_to_all"),
        )

    tables = launch(all_of_them, world_size=2)[0]
    assert [table.rows[0].wrong for table in tables] == [0, 2, 0, 0, 32, 32]  # elements, on both ranks together
    assert tables[2].rows[0].operation == "all_gather"


def test_a_subgroup_can_be_timed():
    def pairs():
        group, _ = dist.new_subgroups(2)
        return time_collective("all_reduce", [64], repeats=2, group=group), time_collective("reduce", [64], 1, 1)

    tables = launch(pairs, world_size=4)
    assert [table.rows[0].ranks for table, _ in tables] == [2] * 4
    assert [table.rows[0].wrong for pair in tables for table in pair] == [0] * 8


def test_timings_are_a_table_and_a_frame():
    table = Timings((Timing("all_reduce", 4, 1_000_000, 0.5, 0.4, 0.7, wrong=3),))
    assert table.to_frame().loc[0, ["algbw", "busbw", "wrong"]].tolist() == [2e6, 3e6, 3]
    assert "<td>1,000,000</td>" in table._repr_html_() and str(Timings()) == "no size was timed"


# ---------------------------------------------------------------- the command


def command(*options, ranks=2, **environment):
    start = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", str(ranks), "-m"]
    names = ("RANK", "WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT", "LOCAL_RANK")
    clean = {name: value for name, value in os.environ.items() if name not in names}
    return subprocess.run(
        [*(start if ranks else [sys.executable, "-m"]), "course_utils.collectives", *options],
        env={**clean, "OMP_NUM_THREADS": "1", **environment},
        capture_output=True,
        text=True,
        timeout=200,
        check=False,
    )


@pytest.mark.parametrize("operation", ["all_reduce", "all_gather"])
def test_the_command_prints_the_table_of_nccl_tests(operation):
    done = command("--op", operation, "-b", "1K", "-e", "16K", "-f", "4", "-n", "5", "-w", "1", "--device", "cpu")
    assert done.returncode == 0, done.stderr
    lines = done.stdout.splitlines()
    assert lines[0].startswith(f"# {operation} on 2 ranks (CPU, Gloo)")
    assert lines[1].split() == "# size count type redop root time algbw busbw #wrong".split()
    rows = [line.split() for line in lines if not line.startswith("#")]
    redop = "sum" if operation == "all_reduce" else "none"
    assert [row[:5] for row in rows] == [[str(n), str(n // 4), "float", redop, "-1"] for n in (1024, 4096, 16384)]
    for size, _, _, _, _, micro, algbw, busbw, wrong in rows:
        assert float(algbw) == pytest.approx(float(size) / float(micro) / 1e3, abs=1e-3)
        assert float(busbw) == pytest.approx(float(algbw) * (1 if operation == "all_reduce" else 0.5), abs=1e-3)
        assert wrong == "0"
    assert "# Wrong elements : 0 OK" in lines and any(line.startswith("# Avg bus bandwidth") for line in lines)


def test_alone_the_command_says_one_sentence_and_how_to_start_it():
    done = command(ranks=0)
    assert done.returncode == 2 and done.stdout == ""
    assert done.stderr.count("\n") == 1 and done.stderr.count(". ") == 0
    assert "torchrun --standalone --nproc-per-node 2 -m course_utils.collectives" in done.stderr
    assert "Traceback" not in done.stderr


@pytest.mark.parametrize(
    ("options", "words"),
    [
        (["--op", "all_sum"], "invalid choice: 'all_sum'"),
        (["--begin", "many"], "'many' is no size"),
        (["--end", "0"], "'0' is no size"),
        (["--begin", "2K", "--end", "1K"], "--begin 2048 is above --end 1024"),
        (["--factor", "1"], "'1' is no factor: a number above 1"),
        (["--factor", "nan"], "'nan' is no factor"),
        (["--iters", "0"], "'0' is no count: a whole number was expected, 1 or more"),
        (["--warmup", "-1"], "'-1' is no count"),
    ],
)
def test_bad_options_are_refused_before_anything_starts(options, words, capsys):
    from course_utils.collectives.__main__ import main

    with pytest.raises(SystemExit) as stopped:
        main(options)
    assert stopped.value.code == 2 and words in capsys.readouterr().err


def test_the_command_says_so_when_there_are_fewer_gpus_than_processes(monkeypatch, capsys):
    from course_utils.collectives.__main__ import main

    for name, value in {"RANK": "0", "LOCAL_RANK": "0", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "1"}.items():
        monkeypatch.setenv(name, value)
    monkeypatch.setenv("WORLD_SIZE", "1000")
    assert main(["--device", "cuda"]) == 2
    assert "--device cuda needs a GPU for each of the 1000 processes" in capsys.readouterr().err


# ---------------------------------------------------------------- refusals

NAN, INF = float("nan"), float("inf")
ring = costs.ring_all_reduce


@pytest.mark.parametrize(
    ("call", "words"),
    [
        (lambda: ring(24, 0), "ranks=0: at least 1"),
        (lambda: ring(24, 2.5), "ranks=2.5: a whole number"),
        (lambda: ring(NAN, 4), "size=nan: a whole number"),
        (lambda: ring(-1, 4), "size=-1: at least 0"),
        (lambda: ring("24", 4), "size='24': a number was expected, not a str"),
        (lambda: ring(True, 4), "size=True: a number"),
        (lambda: costs.recursive_doubling_all_reduce(24, 0), "ranks=0"),
        (lambda: costs.naive_ring_all_reduce(24, 0), "ranks=0"),
        (lambda: costs.tree_all_reduce(24, -3), "ranks=-3"),
        (lambda: costs.tree_scatter(24, 0), "ranks=0"),
        (lambda: costs.barrier(0), "ranks=0"),
        (lambda: costs.send(INF), "size=inf: a whole number"),
        (lambda: costs.rabenseifner_all_reduce(24, 6), "ranks=6 is no power of two"),
        (lambda: costs.hierarchical_all_reduce(24, 0, 2), "ranks_per_node=0"),
        (lambda: costs.hierarchical_all_reduce(24, 4, 0), "nodes=0"),
        (lambda: costs.hierarchical_all_reduce(24, 4, 2, links_per_node=5), "links_per_node=5 is more than"),
        (lambda: Cost(1, 1).seconds(-1e-6, 0), "alpha=-1e-06: a number that is neither negative"),
        (lambda: Cost(1, 1).seconds(0, NAN), "beta=nan"),
        (lambda: Cost(1, 1).seconds(None, 0), "alpha=None: a number was expected, not a NoneType"),
        (lambda: crossover(ring, costs.tree_all_reduce, 8, 1e-6, 0), "beta=0"),
        (lambda: crossover(ring, costs.tree_all_reduce, 8, -1, 1), "alpha=-1"),
        (lambda: bus_factor("all_sum", 4), "operation='all_sum' is none of all_reduce"),
        (lambda: bus_factor("all_reduce", 0), "ranks=0"),
        (lambda: algorithm_bandwidth(100, 0), "seconds=0: a time above 0"),
        (lambda: algorithm_bandwidth(100, NAN), "seconds=nan"),
        (lambda: bus_bandwidth("all_reduce", -1, 4, 1.0), "size=-1"),
        (lambda: Timing("all_reduce", 4, 100, NAN, 0, 0), "seconds=nan"),
        (lambda: Timings((1,)), "Timings holds Timing rows, and was given a int"),
        (lambda: copy_bandwidth(0), "size=0: at least 1"),
        (lambda: copy_bandwidth(1024, repeats=0), "repeats=0"),
        (lambda: fit([1, 2], [1.0, 2.0]), "2 points at 2 different sizes are too few"),
        (lambda: fit([5, 5, 5], [1.0, 2.0, 3.0]), "3 points at 1 different sizes are too few"),
        (lambda: fit([1, 2, 3], [1.0, 2.0]), "3 sizes and 2 times"),
        (lambda: fit([1, 2, 3], [1.0, 2.0, 0.0]), "seconds=0"),
        (lambda: fit([1, 2, 3], [1.0, 2.0, NAN]), "seconds=nan"),
        (lambda: fit([1, 2, -3], [1.0, 2.0, 3.0]), "size=-3"),
        (lambda: fit([1, 2, 3], [1.0, 2.0, 3.0], lambda size: Cost(size, size)), "can't be told apart"),
        (lambda: simulate.ring_all_reduce([]), "zero ranks have none"),
        (lambda: simulate.ring_all_reduce(7), "tensors=7: one tensor for each rank"),
        (lambda: simulate.tree_all_reduce([[1, 2], [3]]), r"rank 1 is int64\[1\] and that of rank 0 int64\[2\]"),
        (lambda: simulate.tree_all_reduce([[1], [3.0]]), "rank 1 is float64"),
        (lambda: simulate.tree_all_reduce([["a"], ["b"]]), "one dimension of ints or floats"),
        (lambda: simulate.ring_all_reduce([[1], [2]]).timeline(-1, 0), "alpha=-1"),
        (lambda: time_collective("all_reduce", [1024]), "no process group is up here"),
        (lambda: time_collective("all_sum", [1024]), "operation='all_sum' is none of"),
        (lambda: time_collective(3, [1024]), "op=3: the name of an operation or a function"),
        (lambda: time_collective("all_reduce", [1024], repeats=0), "repeats=0: at least 1"),
        (lambda: time_collective("all_reduce", [1024], warmup=-1), "warmup=-1"),
    ],
)
def test_bad_input_is_refused_by_name(call, words):
    with pytest.raises((TypeError, ValueError, RuntimeError), match=words):
        call()


def test_a_size_below_one_element_for_each_rank_is_refused_on_the_ranks():
    def too_small():
        said = []
        for operation, size in (("all_reduce", 3), ("all_gather", 7), ("all_reduce", NAN)):
            try:
                time_collective(operation, [size])
            except ValueError as error:
                said.append(str(error))
        return said

    assert launch(too_small, world_size=2)[0] == [
        "size=3 bytes is less than one float32: at least 4 were expected",
        "size=7 bytes is less than one float32 for each of 2 ranks: at least 8 were expected",
        "size=nan: a whole number was expected",
    ]


def test_importing_needs_no_torch_and_is_quick():
    script = "import time, sys; t = time.perf_counter(); import course_utils.collectives as c; "
    script += "c.costs.ring_all_reduce(8, 2); t = time.perf_counter() - t; print(t, 'torch' in sys.modules)"
    done = [
        subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, check=True, timeout=60)
        for _ in range(3)
    ]
    assert all(run.stdout.split()[1] == "False" for run in done)
    assert min(float(run.stdout.split()[0]) for run in done) < 3  # 0.1 s when idle: this bound catches a heavy import
