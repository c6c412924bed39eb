"""The owner's signed choice of models."""

from crypto.seal.identity import open_document
from shoal.errors import UsageError
from shoal.owner.console.asking import sign_choice
from shoal.protocol.documents import ModelChoice
from tests.helpers.refusals import refused


def opened(place, signed):
    return open_document(signed, ModelChoice, place.owner.owner.member.sign_key)


def test_names_a_run_and_its_number_grows(place):
    """It names a signed run and the newest and its number grows."""
    first, second = place.sign(), place.sign()
    choice = opened(place, sign_choice(place.owner, first.run, print))
    assert (choice.fleet, choice.run, choice.run_id, choice.latest) == ("reef", first.run, first.run_id, second.run)
    back = opened(place, sign_choice(place.owner, 0, print))
    assert (back.run, back.run_id) == (0, bytes(16))
    assert back.sequence > choice.sequence


def test_unsigned_run_is_refused(place):
    """A run that the owner has not signed is refused."""
    place.sign()
    with refused(UsageError, "there is no signed run 9", hint_is="the signed runs are: 1"):
        sign_choice(place.owner, 9, print)
