"""Timelines: times against sums made by hand, the recorder on live ranks, the trace against the rules of its format."""

import itertools
import json
import pickle
import subprocess
import sys
import time

import pytest

from course_utils import launch
from course_utils.timeline import KINDS, Event, Timeline, merge, note, recording

# Rank 0 computes 0-4, communicates 3-6 and updates 6-7; rank 1 loads 0-1, computes 1-3, waits 3-7.
STEP = Timeline(
    (
        Event(1, 3, 7, "waiting"),
        Event(0, 3, 6, "communication", "all-reduce"),
        Event(0, 0, 4, "compute", "backward"),
        Event(0, 6, 7, "optimizer"),
        Event(1, 0, 1, "loading"),
        Event(1, 1, 3, "compute"),
    )
)


def test_events_are_kept_by_rank_and_start_and_the_order_given_does_not_matter():
    assert [(event.rank, event.start) for event in STEP] == [(0, 0), (0, 3), (0, 6), (1, 0), (1, 1), (1, 3)]
    assert Timeline(tuple(reversed(STEP.events))) == STEP
    assert STEP.ranks == (0, 1) and STEP.kinds == KINDS and len(STEP) == 6
    assert [len(part) for part in STEP.by_rank().values()] == [3, 3]


def test_times_are_the_sums_made_by_hand():
    assert (STEP.start, STEP.stop, STEP.makespan) == (0, 7, 7)
    assert STEP.seconds("compute") == {0: 4, 1: 2}
    assert STEP.seconds() == {0: 7, 1: 7}  # rank 0: 4 + 3 + 1, of which second 3 to 4 is counted once
    assert STEP.busy() == pytest.approx({0: 1, 1: 3 / 7})  # waiting is not being busy
    assert STEP.idle() == pytest.approx({0: 0, 1: 4 / 7})
    assert STEP.busy("compute") == pytest.approx({0: 4 / 7, 1: 2 / 7})
    assert STEP.overlap() == {0: 1, 1: 0}  # seconds 3 to 4
    assert STEP.overlap("communication", "optimizer") == {0: 0, 1: 0}
    assert STEP.only(lambda event: event.kind == "compute").makespan == 4


def test_the_same_second_counts_once_however_many_events_cover_it():
    nested = Timeline((Event(0, 0, 10, "compute"), Event(0, 2, 3, "compute"), Event(0, 9, 12, "compute")))
    assert nested.seconds("compute") == {0: 12}


def test_an_empty_timeline_is_a_value_like_any_other():
    nothing = Timeline()
    assert (nothing.makespan, nothing.ranks, nothing.busy(), str(nothing)) == (0, (), {}, "no events")
    assert nothing.to_trace()["traceEvents"] == [] and merge([]) == nothing
    assert Timeline((Event(0, 1, 1, "compute"),)).busy() == {0: 0.0}


def test_shift_and_merge_start_at_zero():
    parts = [part.shift(100) for part in STEP.by_rank().values()]
    assert parts[0].start == 100
    assert merge(parts) == STEP
    assert STEP.shift(-2).start == -2


def test_text_has_a_line_per_rank_and_a_second_one_for_communication_behind_work():
    lines = STEP.text(width=28).splitlines()  # four characters a second
    assert lines == [
        "rank 0  ################        xxxx",
        "                    ////////////",
        "rank 1  \\\\\\\\########................",
        "        0 s                      7 s",
        "# compute, / communication, . waiting, \\ loading, x optimizer",
    ]
    assert str(STEP) == repr(STEP) == STEP.text()


def test_the_frame_has_a_line_per_event():
    frame = STEP.to_frame()
    assert list(frame.columns) == ["rank", "start", "stop", "seconds", "kind", "name"]
    assert frame.groupby("rank")["seconds"].sum().to_dict() == {0: 8.0, 1: 7.0}


def test_the_trace_follows_the_trace_event_format(tmp_path):
    """Complete events have name, cat, ph, ts, dur, pid, tid; times are in µs; what shares a thread never crosses."""
    crossing = [Event(0, t, t + 2.5, "communication", f"bucket {t}") for t in range(4)]
    timeline = Timeline((*STEP.events, *crossing)).shift(1234.5)
    trace = json.loads(timeline.write_trace(tmp_path / "step.json").read_text(encoding="utf-8"))
    assert set(trace) == {"traceEvents", "displayTimeUnit"} and trace["displayTimeUnit"] in ("ms", "ns")
    complete = [event for event in trace["traceEvents"] if event["ph"] == "X"]
    metadata = [event for event in trace["traceEvents"] if event["ph"] == "M"]
    assert len(complete) == len(timeline) and len(complete) + len(metadata) == len(trace["traceEvents"])
    for event in complete:
        assert set(event) == {"name", "cat", "ph", "ts", "dur", "pid", "tid"}
        assert event["ts"] >= 0 and event["dur"] >= 0 and event["cat"] in KINDS
    backward = next(event for event in complete if event["name"] == "backward")
    assert (backward["ts"], backward["dur"], backward["pid"]) == (0.0, 4e6, 0)
    threads = {}
    for event in complete:
        threads.setdefault((event["pid"], event["tid"]), []).append((event["ts"], event["ts"] + event["dur"]))
    for events in threads.values():
        for (_, stop), (start, _) in itertools.pairwise(sorted(events)):
            assert stop <= start
    assert len({tid for _, tid in threads}) == len(threads)
    named = {
        (event["pid"], event["tid"]): event["args"]["name"] for event in metadata if event["name"] == "thread_name"
    }
    assert set(named) == set(threads)
    assert {e["args"]["name"] for e in metadata if e["name"] == "process_name"} == {"rank 0", "rank 1"}


# ---------------------------------------------------------------- recording


def test_live_ranks_are_recorded_on_one_clock():
    """All ranks sleep through one barrier: what follows it starts at the same time, and the sleeps were as long."""

    def step():
        import torch.distributed as dist

        from course_utils.timeline import recording

        with recording() as recorder:
            dist.barrier()
            with recorder("compute", "sleep"):
                time.sleep(0.2)
            with recorder("communication", "barrier"):
                dist.barrier()
        return recorder.timeline()

    parts = launch(step, world_size=2)
    timeline = merge(parts)
    assert timeline.start == 0 and timeline.ranks == (0, 1)
    assert [(event.kind, event.name) for event in timeline] == [("compute", "sleep"), ("communication", "barrier")] * 2
    for seconds in timeline.seconds("compute").values():
        assert 0.2 <= seconds < 0.6
    starts = [part.start for part in parts]
    assert abs(starts[0] - starts[1]) < 0.15  # two clocks would differ by hours
    assert 0.2 < timeline.makespan < 1.0


def test_a_block_is_noted_when_it_ends_by_an_error_and_blocks_nest():
    with recording(rank=5) as recorder:
        with pytest.raises(ZeroDivisionError), recorder("compute", "outer"), recorder("communication", "inner"):
            1 / 0  # noqa: B018
        note("optimizer", "noted by a library", 1.0, 2.0)
    note("optimizer", "after the end", 1.0, 2.0)
    timeline = pickle.loads(pickle.dumps(recorder.timeline()))
    assert sorted(event.name for event in timeline) == ["inner", "noted by a library", "outer"]
    assert timeline.ranks == (5,)
    outer, inner = (next(e for e in timeline if e.name == name) for name in ("outer", "inner"))
    assert outer.start <= inner.start <= inner.stop <= outer.stop


def test_the_rank_comes_from_the_launcher_where_no_group_is_up(monkeypatch):
    monkeypatch.setenv("RANK", "3")
    with recording() as recorder:
        pass
    assert recorder.rank == 3


# ---------------------------------------------------------------- refusals


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        ((-1, 0, 1, "compute"), "rank=-1: at least 0"),
        ((0.5, 0, 1, "compute"), "rank=0.5: a whole number"),
        ((True, 0, 1, "compute"), "rank=True"),
        ((0, float("nan"), 1, "compute"), "start=nan: a finite number"),
        ((0, 0, float("inf"), "compute"), "stop=inf"),
        ((0, "0", 1, "compute"), "start='0': seconds were expected"),
        ((0, 2, 1, "compute"), "start=2, stop=1: an event can't stop before it starts"),
        ((0, 0, 1, "computing"), "kind='computing' is none of compute, communication"),
        ((0, 0, 1, "compute", 7), "name=7: a text"),
    ],
)
def test_a_bad_event_is_refused_by_name(arguments, words):
    with pytest.raises((TypeError, ValueError), match=words.replace("(", r"\(")):
        Event(*arguments)


@pytest.mark.parametrize(
    ("call", "words"),
    [
        (lambda: Timeline((1,)), "a Timeline holds Events, and was given a int"),
        (lambda: merge([STEP, None]), "item 1 is None: end the function"),
        (lambda: STEP.only("compute"), "a function from an event"),
        (lambda: STEP.seconds("rest"), "kind='rest' is none of"),
        (lambda: STEP.overlap("compute", "talk"), "kind='talk' is none of"),
        (lambda: STEP.shift(float("nan")), "seconds=nan"),
        (lambda: STEP.text(width=3), "width=3: at least 20"),
    ],
)
def test_a_bad_call_is_refused_by_name(call, words):
    with pytest.raises((TypeError, ValueError), match=words):
        call()


def test_a_wrong_kind_is_refused_before_the_block_runs():
    ran = []
    with recording() as recorder, pytest.raises(ValueError, match="kind='work' is none of"):
        with recorder("work"):
            ran.append(1)
    assert not ran


def test_importing_needs_no_torch_and_is_quick():
    script = "import time, sys; t = time.perf_counter(); import course_utils.timeline; t = time.perf_counter() - t; "
    script += "print(t, any(name in sys.modules for name in ('torch', 'numpy', 'pandas', 'matplotlib')))"
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, check=True, timeout=60)
    seconds, heavy = done.stdout.split()
    assert float(seconds) < 0.3 and heavy == "False"
