"""What `launch` says when something goes wrong: the best-explained part of the course."""

import os
import resource
import signal
import sys
import threading
import time

import pytest
import torch
import torch.distributed as dist

from course_utils import RankError, RankTimeout, World, launch

LONG = 1000  # seconds that nobody will wait


def error_of(fn, world_size=4, kind=RankError, **options) -> str:
    with pytest.raises(kind) as caught:
        launch(fn, world_size=world_size, **options)
    assert launch(dist.get_rank, world_size=2) == [0, 1]  # the next launch works
    return str(caught.value)


# ---------------------------------------------------------------- a raise


def test_a_raise_names_the_rank_shows_its_own_lines_and_what_the_others_did():
    def divide(r):
        return 1 / (r - 2)

    def work():
        divide(dist.get_rank())
        dist.all_reduce(torch.ones(4))

    start = time.monotonic()
    with pytest.raises(RankError) as caught:
        launch(work, world_size=4)
    assert time.monotonic() - start < 30  # the promise is a second; this bound only catches a hang
    text = str(caught.value)
    assert caught.value.rank == 2 and not isinstance(caught.value, RankTimeout)
    assert text.startswith("rank 2 raised ZeroDivisionError: division by zero")
    assert "-->" in text and "return 1 / (r - 2)" in text and "divide(dist.get_rank())" in text
    assert "ranks 0, 1, 3 were waiting in all_reduce (collective #1) of float32[4], line " in text
    assert "site-packages" not in text and "course_utils" not in text


def test_the_same_error_on_every_rank_is_said_once():
    def work():
        raise KeyError("lr")

    text = error_of(work)
    assert text.startswith("every rank raised KeyError: 'lr'") and text.count("KeyError: 'lr'") == 1


def test_the_earliest_failure_is_shown_and_its_echoes_are_not():
    def work():
        if dist.get_rank() == 1:
            os._exit(3)
        dist.all_reduce(torch.ones(4))

    text = error_of(work)
    assert text.startswith("rank 1 ended the process with exit code 3, in the middle of the call")
    assert "closed by peer" not in text and "ranks 0, 2, 3 were waiting in all_reduce" in text


def test_an_exit_of_python_and_an_error_without_words_are_told():
    assert "raised SystemExit: 2" in error_of(lambda: sys.exit(2), 2)
    assert "raised AssertionError\n" in error_of(_assert_nothing, 2) + "\n"


def _assert_nothing():
    assert dist.get_rank() < 0


def test_what_was_printed_before_the_failure_is_shown(capsys):
    def work():
        print("before")
        raise ValueError("after")

    error_of(work, 2)
    assert capsys.readouterr().out == "[rank 0] before\n[rank 1] before\n"


def test_errors_with_odd_texts_causes_and_depths_are_reported():
    class Odd(Exception):
        def __str__(self):
            raise KeyError

    def odd():
        raise Odd

    def caused():
        try:
            int("x")
        except ValueError as error:
            raise RuntimeError("reading the config") from error

    def deep(n=0):
        return deep(n + 1)

    assert "Odd: (its text can't be had: KeyError)" in error_of(odd, 1)
    assert "because of ValueError: invalid literal for int() with base 10: 'x'" in error_of(caused, 1)
    text = error_of(deep, 1)
    assert "RecursionError" in text and "more calls" in text and len(text.splitlines()) < 30


@pytest.mark.parametrize("line", ["." * 100, "." * 100 + "\n"])
def test_the_timeout_holds_however_much_is_printed(line):
    def work():
        while True:
            sys.stdout.write(line)

    start = time.monotonic()
    assert "still running after 1 s" in error_of(work, 1, kind=RankTimeout, timeout=1)
    assert time.monotonic() - start < 60


# ---------------------------------------------------------------- a death


@pytest.mark.parametrize("number", [signal.SIGKILL, signal.SIGSEGV, signal.SIGABRT, signal.SIGTERM])
def test_a_rank_ended_by_a_signal_is_named_with_its_last_place(number):
    def work():
        if dist.get_rank() == 1:
            time.sleep(0.4)
            os.kill(os.getpid(), number)
        dist.barrier()

    text = error_of(work, 3)
    assert text.startswith(f"rank 1 was ended by {number.name}")
    assert "it was last seen in line " in text and ", in work:" in text
    assert "ranks 0, 2 were waiting in barrier" in text


def test_a_crash_in_compiled_code_shows_the_line():
    def work():
        import ctypes

        ctypes.string_at(0)

    text = error_of(work, 1)
    assert "rank 0 was ended by SIGSEGV: a crash in compiled code" in text
    assert "ctypes.string_at(0)" in text.split("-->")[1].splitlines()[0]


# ---------------------------------------------------------------- ranks that wait forever


def test_a_rank_that_never_comes_is_named_with_its_line_and_the_others_with_collective_and_shape():
    def work():
        x = torch.ones(4)
        if dist.get_rank() == 2:
            time.sleep(LONG)
        dist.all_reduce(x)

    lines = error_of(work, kind=RankTimeout, timeout=0.7).splitlines()
    assert lines[0] == "the ranks waited for each other until the timeout of 0.7 s"
    assert lines[1] == "Why: rank 2 never came to all_reduce (collective #1)."
    assert lines[2].startswith("  ranks 0, 1, 3 were waiting in all_reduce (collective #1) of float32[4], line ")
    assert lines[2].endswith(": dist.all_reduce(x)")
    assert lines[3].startswith("  rank 2 was running, line ") and lines[3].endswith(": time.sleep(LONG)")


def test_a_rank_that_returned_without_joining_is_found_before_the_timeout():
    def work():
        if dist.get_rank() != 2:
            dist.all_reduce(torch.ones(4))

    start = time.monotonic()
    text = error_of(work, kind=RankTimeout, timeout=LONG)
    assert time.monotonic() - start < 60
    assert text.startswith("the ranks wait for each other and would do so forever")
    assert "and rank 2 returns without calling it" in text and "rank 2 had returned" in text


def test_a_circle_of_receivers_is_explained():
    def work():
        x, rank = torch.ones(4), dist.get_rank()
        dist.recv(x, (rank + 1) % 3)
        dist.send(x, (rank - 1) % 3)

    text = error_of(work, 3, kind=RankTimeout, timeout=0.7)
    assert "each of them waits for a message that nobody sends" in text
    assert all(f"rank {r} was waiting in recv of float32[4], src={(r + 1) % 3}, line " in text for r in range(3))


def test_a_rank_missing_in_backward_is_named():
    def work():
        from torch.distributed._functional_collectives import all_gather_single_autograd

        y = all_gather_single_autograd(torch.ones(4, requires_grad=True), 0, dist.group.WORLD)
        if dist.get_rank() != 1:
            y.sum().backward()

    text = error_of(work, 3, kind=RankTimeout, timeout=LONG)
    assert "ranks 0, 2 were waiting in" in text and "y.sum().backward()" in text
    assert "and rank 1 returns without calling it" in text


def test_a_rank_missing_in_a_subgroup_is_named_and_the_group_with_it():
    def work():
        group = dist.new_group([0, 2])
        if dist.get_rank() == 2:
            dist.all_reduce(torch.ones(3), group=group)

    text = error_of(work, 3, kind=RankTimeout, timeout=LONG)
    assert "rank 2 calls collective #1 of the group of ranks 0, 2, all_reduce of float32[3]" in text
    assert "and rank 0 returns without calling it" in text


def test_work_that_is_only_slow_is_told_from_a_deadlock():
    def work():
        while True:
            time.sleep(0.01)

    text = error_of(work, 2, kind=RankTimeout, timeout=0.7)
    assert text.startswith("ranks 0, 1 were still running after 0.7 s: if the work is only slow, give it more time")


def test_asking_for_the_rank_is_no_waiting():
    def work():
        while dist.get_rank() == 1:
            pass

    text = error_of(work, 2, kind=RankTimeout, timeout=0.7)
    assert "rank 1 was running" in text and "waiting" not in text


def test_a_slow_call_that_gets_there_is_not_disturbed():
    def work():
        time.sleep(1.5 * dist.get_rank())
        x = torch.ones(1)
        dist.all_reduce(x)
        return x.item()

    assert launch(work, world_size=3) == [3.0] * 3


def test_a_rank_busy_in_compiled_code_is_told_apart():
    def work():
        if dist.get_rank() == 0:
            sum(range(10**12))  # holds the interpreter: nobody in the process can answer
        dist.barrier()

    text = error_of(work, 2, kind=RankTimeout, timeout=0.7)
    assert "rank 1 was waiting in barrier" in text and "rank 0" in text


# ---------------------------------------------------------------- calls that don't match


def test_different_shapes_never_give_a_result():
    def work():
        x = torch.ones(6 if dist.get_rank() == 3 else 4)
        dist.all_reduce(x)
        return x

    text = error_of(work, timeout=LONG)
    assert "the ranks don't agree in all_reduce, collective #1: ranks 0, 1, 2 come with float32[4] (line " in text
    assert "rank 3 comes with float32[6] (line " in text


def test_different_dtypes_which_torch_lets_pass_never_give_a_result():
    def work():
        x = torch.ones(4, dtype=torch.int32 if dist.get_rank() == 1 else torch.float32)
        dist.all_reduce(x)
        return x

    text = error_of(work, 2)
    assert text.startswith("no result, for it would be wrong: the ranks don't agree in all_reduce, collective #1: ")
    assert "rank 0 comes with float32[4] (line " in text and "rank 1 comes with int32[4] (line " in text


def test_different_operations_are_named():
    def work():
        x = torch.ones(4)
        if dist.get_rank() == 1:
            dist.broadcast(x, 0)
        else:
            dist.all_reduce(x)

    text = error_of(work, 3, timeout=LONG)
    assert "don't agree in collective #1: ranks 0, 2 call all_reduce of float32[4] (line " in text
    assert "rank 1 calls broadcast of float32[4] (line " in text


def test_different_orders_are_named_at_the_first_difference():
    def work():
        small, large = torch.ones(2), torch.ones(4)
        dist.barrier()
        for x in (small, large) if dist.get_rank() == 1 else (large, small):
            dist.all_reduce(x)

    text = error_of(work, 2, timeout=LONG)
    assert "collective #2: rank 0 comes with float32[4]" in text and "rank 1 comes with float32[2]" in text


def test_different_roots_are_named():
    def work():
        dist.broadcast(torch.ones(4), dist.get_rank())

    text = error_of(work, 2, timeout=LONG)
    assert "the ranks don't agree on src in broadcast: rank 0 says src=0, rank 1 says src=1" in text


def test_different_reductions_never_give_a_result():
    def work():
        x = torch.ones(2) + dist.get_rank()
        dist.all_reduce(x, op=dist.ReduceOp.MAX if dist.get_rank() else dist.ReduceOp.SUM)
        return x

    assert "don't agree on op in all_reduce: rank 0 says op=SUM, rank 1 says op=MAX" in error_of(work, 2)


def test_a_broadcast_that_only_its_source_calls_is_no_success():
    def work():
        if dist.get_rank() == 0:
            dist.broadcast(torch.ones(4), 0)

    text = error_of(work, 2, timeout=LONG)
    assert "rank 0 calls collective #1, broadcast of float32[4]" in text
    assert "and rank 1 returns without calling it" in text


@pytest.mark.parametrize(
    "sent, received, words",
    [
        (
            torch.ones(4),
            torch.zeros(6),
            "message #1 from rank 0 to rank 1 is sent as float32[4] and received as float32[6]",
        ),
        (torch.ones(4), torch.zeros(4, dtype=torch.int32), "is sent as float32[4] and received as int32[4]"),
    ],
)
def test_messages_that_do_not_fit_their_receiver_never_give_a_result(sent, received, words):
    def work():
        if dist.get_rank() == 0:
            dist.send(sent, 1)
        else:
            dist.recv(received, 0)
            return received

    assert words in error_of(work, 2, timeout=10)


def test_a_message_that_nobody_receives_is_named():
    def work():
        if dist.get_rank() == 0:
            dist.isend(torch.ones(2), 1)

    text = error_of(work, 2, timeout=10)
    assert "rank 0 sends message #1 to rank 1, float32[2], and rank 1 returns without receiving it" in text


@pytest.mark.parametrize("operation", [dist.all_reduce, lambda x: dist.broadcast(x, 0), lambda x: dist.reduce(x, 0)])
def test_a_tensor_with_gaps_which_gloo_corrupts_never_gives_a_result(operation):
    def work():
        column = torch.arange(16.0).reshape(4, 4)[:, 1]
        operation(column)
        return column

    assert "of a tensor with gaps in memory (shape [4], strides [4])" in error_of(work, 2)


def test_a_transposed_tensor_is_no_tensor_with_gaps():
    def work():
        x = torch.arange(6.0).reshape(2, 3).T
        dist.all_reduce(x)
        return x

    assert torch.equal(launch(work, world_size=2)[1], 2 * torch.arange(6.0).reshape(2, 3).T)


def test_a_message_from_anyone_is_compared_with_what_its_sender_sent():
    def work():
        if dist.get_rank() == 0:
            dist.send(torch.ones(2), 1)
        else:
            dist.recv(x := torch.zeros(2, dtype=torch.int32))
            return x

    assert "from rank 0 to rank 1 is sent as float32[2] and received as int32[2]" in error_of(work, 2, timeout=10)


def test_ranks_may_leave_their_groups_at_different_times():
    def leave_the_world():
        dist.all_reduce(torch.ones(1))
        time.sleep(1.5 * (dist.get_rank() == 0))
        dist.destroy_process_group()

    def leave_a_group():
        group = dist.new_group([0, 1])
        dist.all_reduce(torch.ones(1), group=group)
        if dist.get_rank() == 0:
            dist.destroy_process_group(group)
        return True

    assert launch(leave_the_world, world_size=2) == [None, None]
    assert launch(leave_a_group, world_size=2) == [True, True]


def test_a_scripts_own_init_process_group_finds_its_group_up():
    def script():
        dist.init_process_group("gloo")
        return dist.get_world_size()

    assert launch(script, world_size=2) == [2, 2]


def test_making_groups_all_the_time_disturbs_nothing():
    def work():
        end = time.monotonic() + 2
        while time.monotonic() < end:
            dist.new_group([0])
        time.sleep(1000 * dist.get_rank())

    assert "rank 1 was running" in error_of(work, 2, kind=RankTimeout, timeout=4)


def test_calls_that_match_are_left_alone():
    def work():
        rank, size = dist.get_rank(), dist.get_world_size()
        x = torch.arange(4.0) + rank
        parts = [torch.empty(4) for _ in range(size)]
        dist.gather(x, parts if rank == 1 else None, dst=1)
        dist.scatter(x, parts if rank == 1 else None, src=1)
        dist.reduce(x, 2)
        uneven = torch.empty(sum(range(1, size + 1))) if rank == 0 else torch.empty(0)
        dist.all_to_all_single(
            uneven,
            torch.ones(rank + 1),
            list(range(1, size + 1)) if rank == 0 else [0] * size,
            [rank + 1] + [0] * (size - 1),
        )
        dist.all_gather_object(parts, {"a": "x" * rank})
        dist.all_reduce(torch.ones(2, 2) if rank else torch.ones(4))  # the same four floats
        ops = [dist.P2POp(dist.isend, x, (rank + 1) % size), dist.P2POp(dist.irecv, x.clone(), (rank - 1) % size)]
        for request in dist.batch_isend_irecv(ops):
            request.wait()
        if rank == 0:
            dist.send(x, 2, tag=7)
        if rank == 2:
            dist.recv(x, tag=7)  # from anyone
        return True

    assert launch(work, world_size=3) == [True] * 3


def test_a_difference_after_thousands_of_collectives_is_found():
    def work():
        x = torch.ones(1)
        for _ in range(1000):
            dist.all_reduce(x, op=dist.ReduceOp.MAX)
        if dist.get_rank() == 1:
            x = x.int()
        dist.all_reduce(x)
        return x

    assert "in all_reduce, collective #1001: rank 0 comes with float32[1]" in error_of(work, 2)


def test_thousands_of_collectives_in_one_call_are_fine():
    def work():
        x = torch.ones(1)
        for _ in range(2500):
            dist.all_reduce(x, op=dist.ReduceOp.MAX)
        return x.item()

    assert launch(work, world_size=2) == [1.0, 1.0]


# ---------------------------------------------------------------- values that can't travel


def test_a_result_that_cannot_be_sent_names_the_rank_and_the_type():
    def work():
        return (i for i in range(3)) if dist.get_rank() == 1 else 0

    assert "rank 1: it returned a generator, which can't be sent back to the notebook" in error_of(work, 2)


def test_a_dtensor_says_what_to_return_instead():
    def work():
        from torch.distributed.tensor import Shard, distribute_tensor, init_device_mesh

        return distribute_tensor(torch.ones(4), init_device_mesh("cpu", (2,)), [Shard(0)])

    assert "return x.to_local() (this rank's shard) or x.full_tensor() (the whole)" in error_of(work, 2)


def test_an_argument_that_cannot_be_sent_says_so_before_anything_runs():
    def work(x):
        return x

    lines = (line for line in "abc")
    with pytest.raises(TypeError, match="argument 1 of work, a generator, can't be sent to the ranks: .*generator"):
        launch(work, lines, world_size=2)


def test_a_variable_that_cannot_be_sent_is_named():
    lock = threading.Lock()

    def work():
        with lock:
            return 1

    with pytest.raises(TypeError, match="lock, a lock that work uses, can't be sent to the ranks"):
        launch(work, world_size=2)


def test_arguments_that_do_not_fit_the_function_are_refused_before_anything_starts():
    def work():
        return 1

    with pytest.raises(TypeError, match=r"work\(\) is given 2: too many positional arguments .* ranks is world_size="):
        launch(work, 2)


def test_a_crash_because_ranks_called_different_things_says_which():
    def work():
        x = torch.ones(8, 24, dtype=torch.float64)
        if dist.get_rank() == 0:
            dist.all_gather([torch.empty(2, 24) for _ in range(3)], torch.ones(2, 24))
        else:
            dist.all_reduce(x)

    text = error_of(work, 3, timeout=10)
    if "SIGABRT" in text:  # which of them Gloo gives up on is a matter of timing
        assert "in all_gather" in text and "in all_reduce" in text and "Why: " in text
        assert "waiting in all_gather" not in text.split("ranks 1, 2")[-1]
    else:
        assert "call all_reduce of float64[8, 24]" in text and "calls all_gather of float32[2, 24]" in text


def test_an_async_function_is_refused():
    async def work():
        return 1

    assert "an async function can't run on a rank" in error_of(work, 1)


# ---------------------------------------------------------------- a kept world


def test_one_worlds_mishap_is_no_others():
    with World(2) as other:
        kept = World(2)
        pid = kept.run(os.getpid)[0]
        os.kill(pid, signal.SIGKILL)
        time.sleep(0.3)
        del kept  # with the word of that rank's end unread
        assert other.run(dist.get_rank) == [0, 1]
        soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
        resource.setrlimit(resource.RLIMIT_NOFILE, (len(os.listdir("/proc/self/fd")) + 12, hard))
        try:
            with pytest.raises(OSError, match="Too many open files"):
                launch(dist.get_rank, world_size=20)
        finally:
            resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))
        assert other.run(dist.get_rank) == [0, 1]


def test_a_kept_world_is_closed_by_a_failure_and_says_so():
    kept = World(2)
    with pytest.raises(RankError):
        kept.run(_assert_nothing)
    with pytest.raises(RuntimeError, match=r"this World is closed after the failure of its last call: make a new one"):
        kept.run(dist.get_rank)


def test_collectives_are_numbered_from_the_start_of_each_run():
    def one():
        dist.all_reduce(torch.ones(2))

    def different():
        dist.all_reduce(torch.ones(2 + dist.get_rank()))

    with World(2) as kept:
        kept.run(one)
        kept.run(one)
        with pytest.raises(RankError, match="in all_reduce, collective #1: rank 0 comes with"):
            kept.run(different)
