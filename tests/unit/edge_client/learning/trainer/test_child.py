"""What the process of own training code does with a request; here in this process."""

import socket
import threading

import numpy as np
import pytest

from edge_client.learning.trainer.child import carry_out, layout_lines, load, reason, serve
from edge_client.learning.trainer.messages import MAX_REASON_CHARS, Answer, Request, packet_of
from shoal.errors import TaskError
from tests.helpers import own_trainers
from tests.helpers.own_trainers import Softmax
from tests.helpers.tasks import CLASSES, INPUTS, samples

THETA = np.zeros(INPUTS * CLASSES + 1, np.float32)
HERE = own_trainers.__name__


def begin(layout, name="softmax", version="1"):
    lines = np.frombuffer("\n".join(layout).encode(), np.uint8)
    return carry_out(Softmax(), Request(action="begin", areas=(), name=name, version=version), (lines,))


def test_a_class_is_found():
    assert isinstance(load(f"{HERE}:Softmax"), Softmax)


@pytest.mark.parametrize("spec", [f"{HERE}:command", f"{HERE}:nothing", "no_such_module:Trainer", "builtins:int"])
def test_what_is_no_trainer_is_refused(spec):
    with pytest.raises((TaskError, ImportError, AttributeError)):
        load(spec)


def test_the_task_is_compared():
    layout = layout_lines(Softmax().layout())
    assert begin(layout) == Answer()
    for changed, words in (
        ({"name": "other"}, "is for other 1, and this device has softmax 1"),
        ({"version": "2"}, "is for softmax 2, and"),
        ({"layout": layout[:1]}, "has 1 parameters, and this device's 2"),
        ({"layout": [*layout, "bias (3,)"]}, "has 3 parameters"),
        ({"layout": ["weight (4, 5)", *layout[1:]]}, r"has weight \(4, 5\) where this device's has weight \(4, 3\)"),
    ):
        with pytest.raises(TaskError, match=words):
            begin(**({"layout": layout} | changed))


def test_an_unknown_action_is_refused():
    """And another shape than that of the samples."""
    x, y = samples(5)
    with pytest.raises(TaskError, match=r"losses returned shape \(4,\), not \(5,\)"):
        carry_out(own_trainers.Short(), Request(action="losses", areas=()), (THETA, x, y, np.zeros(5)))
    with pytest.raises(TaskError, match="no action 'explode'"):
        carry_out(Softmax(), Request(action="explode", areas=()), (THETA,))


def test_reasons_are_short_and_say_the_kind():
    assert reason(TaskError("so")) == "so"
    assert reason(KeyError("camera")) == "KeyError: 'camera'"
    assert reason(ValueError("\udcff" + "x" * 1000)).startswith("ValueError: ?xxx")
    assert len(reason(ValueError("x" * 1000))) == MAX_REASON_CHARS


def test_no_memory_is_answered(capsys):
    """The device's side never sends one; the process answers and goes on."""
    ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    thread = threading.Thread(target=serve, args=(theirs, f"{HERE}:Softmax"))
    thread.start()
    ours.sendall(packet_of(Request(action="begin", areas=())))
    assert b"IndexError" in ours.recv(4096)
    ours.close()
    thread.join(10)
    theirs.close()
    assert "IndexError" in capsys.readouterr().err
