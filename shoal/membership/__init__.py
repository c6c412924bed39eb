"""Membership of a fleet: join requests (cards), sealed grants, the signed roster and enrolment tokens.

- The owner is pinned by fingerprint when a party joins; afterwards only that key's signatures are accepted.
- A roster that is older than one seen before is refused, and so are two different rosters of one sequence (a fork).
- A grant is sealed to one party. The aggregator's grant has no field for the secret of a key version.
- A device's grant is sealed to a receiving key, which the device erases once the grant is stored.

`grants` makes and opens cards and grants, `directory` stores a party's keys, grant and newest roster, `roster` checks a
roster, or sends a change of it, `tokens` proves a one-time enrolment token, and
`statements` signs and certifies the states of models.

Joining by file: a device's ``init`` writes keys and a card (`make_identity`); the owner's ``add-device`` signs a roster
with the device and seals a grant (`seal_grant`); the device's ``join`` checks the owner's fingerprint, stores the
grant and erases its receiving key (`accept_grant`). From then on `Membership` loads it.
"""
