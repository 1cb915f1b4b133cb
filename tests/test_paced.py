"""`Paced`: results are the module's own, bit for bit; times are at least those that were chosen, and are recorded."""

import pytest
import torch
from torch import nn

from course_utils.paced import Paced
from course_utils.timeline import recording


def layer():
    torch.manual_seed(0)
    return nn.Linear(5, 3)


def run(module):
    x = torch.arange(10.0).reshape(2, 5).requires_grad_()
    output = module(x)
    output.square().sum().backward()
    return [output.detach(), x.grad, *(parameter.grad for parameter in module.parameters())]


def test_results_and_gradients_are_those_of_the_module():
    assert all(torch.equal(paced, plain) for paced, plain in zip(run(Paced(layer(), 0.001)), run(layer()), strict=True))


def test_forward_and_backward_take_their_time_and_are_recorded():
    with recording(rank=2) as recorder:
        run(Paced(layer(), forward=0.02, backward=0.05, name="layer 7"))
    forward, backward = recorder.timeline()
    assert (forward.rank, forward.kind, forward.name) == (2, "compute", "layer 7")
    assert (backward.kind, backward.name) == ("compute", "layer 7′")
    assert 0.02 <= forward.seconds and 0.05 <= backward.seconds and forward.stop <= backward.start


def test_a_backward_takes_twice_as_long_unless_said_otherwise():
    assert Paced(layer(), 0.01).backward_seconds == 0.02
    assert Paced(layer(), 0.01, 0).backward_seconds == 0


def test_the_time_has_passed_before_the_gradients_of_the_parameters_are_there():
    module = Paced(layer(), forward=0, backward=0.01, name="one")
    order = []
    for parameter in module.parameters():
        parameter.register_post_accumulate_grad_hook(lambda _: order.append(len(recorder.events)))
    with recording(rank=0) as recorder:
        module(torch.ones(1, 5)).sum().backward()
    assert order == [2, 2]  # after the events of the forward and of the backward


def test_two_modules_without_a_name_and_no_gradient():
    with torch.no_grad(), recording(rank=0) as recorder:
        nn.Sequential(Paced(layer(), 0.001), nn.Linear(3, 3))(torch.ones(1, 5))
    assert [(event.kind, event.name) for event in recorder.timeline()] == [("compute", "")]


@pytest.mark.parametrize(
    ("arguments", "error", "words"),
    [
        ((torch.relu, 1.0), TypeError, "module is a builtin_function_or_method: a torch module was expected"),
        ((nn.ReLU(), "1"), TypeError, "forward='1': seconds were expected, not a str"),
        ((nn.ReLU(), True), TypeError, "forward=True: seconds were expected, not a bool"),
        ((nn.ReLU(), 0, 0, 3), TypeError, "name=3: a text was expected, not a int"),
        ((nn.ReLU(), -1), ValueError, "forward=-1: a finite number of seconds, at least 0, was expected"),
        ((nn.ReLU(), 0, float("nan")), ValueError, "backward=nan: a finite number of seconds"),
    ],
)
def test_bad_input_is_refused_by_name(arguments, error, words):
    with pytest.raises(error, match=words.replace("(", r"\(")):
        Paced(*arguments)


def test_an_output_that_is_no_tensor_is_refused():
    with pytest.raises(TypeError, match="returned a tuple: one tensor was expected"):
        Paced(nn.LSTM(5, 3), 0)(torch.ones(1, 1, 5))
