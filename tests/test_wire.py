"""`traffic.wire_bytes`: what a process has really sent over TCP, against transfers of a known size."""

import os
import socket
import sys
import threading

import pytest
import torch
import torch.distributed as dist

from course_utils import launch, traffic

linux = pytest.mark.skipif(not sys.platform.startswith("linux"), reason="only Linux tells how much a socket has sent")
MB = 10**6


def drain(connection):
    while connection.recv(2**16):
        pass


@linux
def test_what_goes_through_a_socket_is_counted_and_nothing_else(tmp_path):
    listener = socket.create_server(("127.0.0.1", 0))
    sender = socket.create_connection(listener.getsockname())
    receiver, _ = listener.accept()
    thread = threading.Thread(target=drain, args=(receiver,))
    thread.start()
    before = traffic.wire_bytes()
    (tmp_path / "file").write_bytes(bytes(MB))  # no socket
    sender.sendall(bytes(10 * MB))
    sender.shutdown(socket.SHUT_WR)
    thread.join()  # until the receiver has it all, some may still lie in the sender's buffer
    after = traffic.wire_bytes()
    for one in (sender, receiver, listener):
        one.close()
    assert 10 * MB <= after - before <= 10.1 * MB


@linux
def test_a_socket_with_two_descriptors_counts_once_and_stays_as_it_is():
    listener = socket.create_server(("127.0.0.1", 0))
    sender = socket.create_connection(listener.getsockname())
    receiver, _ = listener.accept()
    twin = sender.dup()
    before = traffic.wire_bytes()
    sender.sendall(bytes(1000))
    assert len(receiver.recv(1000, socket.MSG_WAITALL)) == 1000
    socket.setdefaulttimeout(5)  # under which a new socket object would make its descriptor non-blocking
    try:
        assert traffic.wire_bytes() - before == 1000
        assert sender.getblocking() and os.get_blocking(sender.fileno())
    finally:
        socket.setdefaulttimeout(None)
        for one in (sender, twin, receiver, listener):
            one.close()


def shares(operations):
    """Of each collective, in units of the whole tensor's size."""
    x = torch.ones(2**20)
    part = torch.empty(len(x) // dist.get_world_size())
    found = {}
    for name in operations:
        dist.barrier()
        before = traffic.wire_bytes()
        {
            "all_reduce": lambda: dist.all_reduce(x),
            "reduce_scatter": lambda: dist.reduce_scatter_single(part, x),
            "all_gather": lambda: dist.all_gather_single(x, part),
        }[name]()
        dist.barrier()
        found[name] = (traffic.wire_bytes() - before) / (4 * len(x))
    return found


@linux
@pytest.mark.parametrize("world_size", [2, 4])
def test_gloo_reduces_and_scatters_by_an_all_reduce(world_size):
    share = (world_size - 1) / world_size
    expected = {"all_reduce": 2 * share, "reduce_scatter": 2 * share, "all_gather": share}
    for found in launch(shares, list(expected), world_size=world_size, device="cpu"):
        assert found == pytest.approx(expected, rel=0.02)


def test_where_the_system_does_not_say_there_is_no_number(monkeypatch):
    monkeypatch.setattr(sys, "platform", "darwin")
    assert traffic.wire_bytes() is None
