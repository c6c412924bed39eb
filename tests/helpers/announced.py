"""Announcements made by hand."""

from shoal.protocol.messages import Announcement, Assignment, Phase, Share
from shoal.protocol.states import Offer, RoundModels, StateId

TRAINING = Assignment(Phase.TRAIN, (0,), Share.TRAIN, train=True, evaluate=False, margins=False)


def announcement(**changes):
    """Return the announcement of round 1 of run 1, in which the roster's first device is to train model 0."""
    fields = {
        "fleet": "reef",
        "run": 1,
        "run_id": b"r" * 16,
        "roster_sequence": 3,
        "round": 1,
        "nonce": b"n" * 16,
        "deadline_s": 60.0,
        "finished": False,
        "assignments": (TRAINING,),
        "assignment_of": (0,),
        "held": RoundModels(3, (Offer(0, StateId(0, 0)),)),
    }
    return Announcement(**(fields | changes))
