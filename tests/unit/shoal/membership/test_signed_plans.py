"""Signed plans of this wire version and of others."""

import dataclasses

import pytest

from crypto.seal.identity import Identity, sign_document
from shoal.errors import UntrustedError, WireError, WireVersionError
from shoal.membership.signed_plans import open_plan
from shoal.protocol.codec import encode
from shoal.version import WIRE
from tests.helpers.plans import run_plan
from tests.helpers.refusals import refused

OWNER = Identity.generate("owner")
KEY = OWNER.member.sign_key
PLAN = run_plan()


def test_later_fields_of_a_plan_are_kept():
    """A plan of this version is returned with its later fields."""
    plan = dataclasses.replace(PLAN, later=((7, b"of a later version"),))
    assert open_plan(sign_document(OWNER, plan), KEY) == plan


@pytest.mark.parametrize("version", [WIRE + 1, 65535])
def test_later_plan_names_who_must_upgrade(version):
    """Also where it has other fields, under another number."""
    signed = sign_document(OWNER, dataclasses.replace(PLAN, wire=version))
    content = encode(PLAN)[:4] + b"\xc8" + version.to_bytes(2, "little") + b"other fields"
    for document in (signed, OWNER.sign("document/RunPlan", content) + content):
        with refused(
            WireVersionError, f"wire version {version}, .* speaks {WIRE}$", hint_is="upgrade Shoal on this machine"
        ):
            open_plan(document, KEY)


def test_earlier_plan_is_to_be_signed_again():
    """A plan of an earlier version is to be signed again."""
    with refused(WireVersionError, f"speaks {WIRE}$", hint_is="upgrade the owner's program, and sign the run again"):
        open_plan(sign_document(OWNER, dataclasses.replace(PLAN, wire=WIRE - 1)), KEY)


def test_forged_later_plan_is_forged():
    """A forged plan of a later version is forged."""
    signed = sign_document(Identity.generate("owner"), dataclasses.replace(PLAN, wire=9))
    with pytest.raises(UntrustedError):
        open_plan(signed, KEY)


@pytest.mark.parametrize("content", [b"", b"SHM1", encode(PLAN)[:-1]])
def test_other_bytes_are_malformed(content):
    """Bytes that are no plan are malformed."""
    with pytest.raises(WireError) as caught:
        open_plan(OWNER.sign("document/RunPlan", content) + content, KEY)
    assert not isinstance(caught.value, WireVersionError)
