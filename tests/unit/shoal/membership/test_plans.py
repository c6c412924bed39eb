"""Signed plans of this wire version and of others."""

import dataclasses

import pytest

from crypto.seal.identity import Identity
from crypto.seal.signed import sign_document
from shoal.errors import UntrustedError, WireError, WireVersionError
from shoal.membership.plans import open_plan
from shoal.protocol.codec import encode
from shoal.version import WIRE
from tests.helpers.plans import run_plan

OWNER = Identity.generate("owner")
KEY = OWNER.member.sign_key
PLAN = run_plan()


def test_a_plan_of_this_version_is_returned_with_its_later_fields():
    plan = dataclasses.replace(PLAN, later=((7, b"of a later version"),))
    assert open_plan(sign_document(OWNER, plan), KEY) == plan


@pytest.mark.parametrize("version", [WIRE + 1, 65535])
def test_a_plan_of_a_later_version_says_who_must_be_upgraded(version):
    """Also where it has other fields, under another number."""
    signed = sign_document(OWNER, dataclasses.replace(PLAN, wire=version))
    content = encode(PLAN)[:4] + b"\xc8" + version.to_bytes(2, "little") + b"other fields"
    for document in (signed, OWNER.sign("document/RunPlan", content) + content):
        with pytest.raises(WireVersionError, match=f"wire version {version}, .* speaks {WIRE}$") as caught:
            open_plan(document, KEY)
        assert caught.value.hint == "upgrade Shoal on this machine"


def test_a_plan_of_an_earlier_version_is_to_be_signed_again():
    with pytest.raises(WireVersionError, match=f"speaks {WIRE}$") as caught:
        open_plan(sign_document(OWNER, dataclasses.replace(PLAN, wire=WIRE - 1)), KEY)
    assert caught.value.hint == "upgrade the owner's program, and sign the run again"


def test_a_forged_plan_of_a_later_version_is_forged():
    signed = sign_document(Identity.generate("owner"), dataclasses.replace(PLAN, wire=9))
    with pytest.raises(UntrustedError):
        open_plan(signed, KEY)


@pytest.mark.parametrize("content", [b"", b"SHM1", encode(PLAN)[:-1]])
def test_bytes_that_are_no_plan_are_malformed(content):
    with pytest.raises(WireError) as caught:
        open_plan(OWNER.sign("document/RunPlan", content) + content, KEY)
    assert not isinstance(caught.value, WireVersionError)
