"""Files and messages in the format that earlier versions wrote, which must be refused."""

from shoal.protocol.codec import encode

EARLIER_PLAN_KIND = 8
"""The kind that a run plan had before each round had keys of its own."""
EARLIER_KINDS = (4, 29)
"""The kind that a device's grant had, and the one that it has now: without it the fields alone must tell them apart."""


def earlier_grant(grant, kind=EARLIER_KINDS[0]):
    """Return a device's grant with a mask secret, a content key and a mask epoch before the secret of the key version."""
    whole = encode(grant)
    at = whole.index(grant.version_secret)
    return whole[:4] + bytes([kind]) + whole[5:at] + b"M" * 32 + b"C" * 32 + bytes(4) + whole[at:]


def earlier_plan(owner, plan):
    """Return a run plan of another kind as the owner, an `Identity`, signed it."""
    whole = encode(plan)
    content = whole[:4] + bytes([EARLIER_PLAN_KIND]) + whole[5:]
    return owner.sign("document/RunPlan", content) + content
