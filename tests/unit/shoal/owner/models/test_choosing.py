"""The owner's signed choice of models."""

import pytest

from crypto.seal.signed import open_document
from shoal.errors import UsageError
from shoal.owner.models.choosing import sign_choice
from shoal.protocol.documents import ModelChoice
from tests.helpers.run_places import RunPlace


@pytest.fixture
def place(tmp_path):
    return RunPlace(tmp_path)


def opened(place, signed):
    return open_document(signed, ModelChoice, place.owner.owner.member.sign_key)


def test_it_names_a_signed_run_and_the_newest_and_its_number_grows(place):
    first, second = place.sign(), place.sign()
    choice = opened(place, sign_choice(place.owner, first.run, print))
    assert (choice.fleet, choice.run, choice.run_id, choice.latest) == ("reef", first.run, first.run_id, second.run)
    back = opened(place, sign_choice(place.owner, 0, print))
    assert (back.run, back.run_id) == (0, bytes(16))
    assert back.sequence > choice.sequence


def test_a_run_that_the_owner_has_not_signed_is_refused(place):
    place.sign()
    with pytest.raises(UsageError, match="there is no signed run 9") as caught:
        sign_choice(place.owner, 9, print)
    assert caught.value.hint == "the signed runs are: 1"
