"""Uploads from the first chunk to the answer: the package's worked example, duplicates, refusals, late uploads, restarts."""

from contextlib import closing

import numpy as np
import pytest

from aggregator.rounds.state import DeadlinePassed
from aggregator.uploads.states import UploadState
from shoal.protocol.messages import Action
from tests.helpers.uploads import Scene, Sent


@pytest.fixture
def scene(tmp_path):
    with closing(Scene(tmp_path)) as made:
        yield made


def refusal(scene):
    """Return the text of the one error that was reported."""
    ((_, error),) = scene.refused
    scene.refused.clear()
    return str(error)


def test_example_in_the_package_docstring(scene):
    packet = scene.packet("dev-1")
    assert len(packet.chunks) == 3
    scene.send(packet, [0, 2])
    assert scene.state_of(packet) is UploadState.RECEIVING
    scene.remind(packet)
    assert scene.publisher.take() == [Sent("dev-1", packet.transfer, Action.NACK, missing=(1,))]
    scene.send(packet, [1])
    assert scene.state_of(packet) is UploadState.VALID
    scene.uploads.flush()
    assert scene.state_of(packet) is UploadState.COMMITTING
    assert scene.publisher.take() == []
    scene.disk.done()
    assert scene.state_of(packet) is UploadState.ACKNOWLEDGED
    scene.remind(packet, turn=2)
    assert scene.publisher.take() == [Sent("dev-1", packet.transfer, Action.ACK)] * 2
    assert scene.state.received["dev-1"][1] == packet.digest


@pytest.mark.parametrize("steps", [0, 1, 2])
def test_a_copy_of_an_upload_changes_nothing(scene, steps):
    """While it waits for the commit, during the commit, and after it."""
    packet = scene.packet("dev-1")
    scene.send(packet)
    for step in (scene.uploads.flush, scene.disk.done)[:steps]:
        step()
    before = scene.state_of(packet)
    scene.send(packet)
    assert scene.state_of(packet) is before
    scene.commit()
    assert scene.publisher.take() == [Sent("dev-1", packet.transfer, Action.ACK)]
    assert scene.durable(1) == {"dev-1": packet.digest}


def test_one_batch_counts_beyond_the_quorum(scene):
    """Uploads of one batch count in their round also beyond the quorum."""
    scene.feed(DeadlinePassed(1))
    scene.send_all(*map(scene.packet, ("dev-1", "dev-2", "dev-3")))
    scene.commit()
    assert scene.state.round == 2
    assert not scene.state.received
    assert [sent.action for sent in scene.publisher.take()] == [Action.ACK] * 3


def test_upload_above_limit_is_not_awaited(scene):
    """An upload above the norm limit is refused and its device not waited for."""
    packet = scene.packet("dev-1", value=50.0)
    assert np.sqrt(600) * 50 > scene.run.recipe.norm_limit
    scene.send(packet)
    assert "above the plan's limit" in refusal(scene)
    ((sent),) = scene.publisher.take()
    assert (sent.action, scene.state_of(packet)) == (Action.REFUSED, UploadState.REFUSED)
    assert "dev-1" in scene.state.declined


def test_upload_during_commit_is_in_the_next(scene):
    first, second = scene.packet("dev-1"), scene.packet("dev-2")
    for packet in (first, second):
        scene.send(packet)
        scene.uploads.flush()
    assert (scene.state_of(first), scene.state_of(second)) == (UploadState.COMMITTING, UploadState.VALID)
    scene.disk.done()
    assert (scene.state_of(first), scene.state_of(second)) == (UploadState.ACKNOWLEDGED, UploadState.COMMITTING)


def test_upload_of_closing_round_is_refused(scene):
    """An upload that is only valid when its round closes is refused."""
    scene.feed(DeadlinePassed(1))
    late = scene.packet("dev-3")
    scene.send_all(*map(scene.packet, ("dev-1", "dev-2")))
    scene.uploads.flush()
    scene.send(late)
    assert scene.state_of(late) is UploadState.VALID
    scene.disk.done()
    assert scene.state.round == 2
    assert scene.publisher.take()[-1] == Sent("dev-3", late.transfer, Action.REFUSED, "the round is not open")
    assert set(scene.durable(1)) == {"dev-1", "dev-2"}
