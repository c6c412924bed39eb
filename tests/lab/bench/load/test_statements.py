"""Statements of uploads that were made without devices."""

from shoal_lab.bench.load.statements import signed_statement

from crypto.seal.identity import Identity
from crypto.seal.signed import open_document
from shoal.protocol.states import StateId, Statement
from tests.helpers.plans import run_plan


def test_a_statement_names_the_states_in_order_with_digests_that_are_equal_for_all_devices():
    plan = run_plan()
    found = []
    for name in ("dev-1", "dev-2"):
        identity = Identity.generate(name)
        signed = signed_statement(identity, plan, 3, {StateId(1, 2), StateId(0, 2), StateId(0, 1)}, bytes(32))
        statement = open_document(signed, Statement, identity.member.sign_key)
        assert (statement.fleet, statement.run_id, statement.round) == (plan.fleet, plan.run_id, 3)
        assert statement.device == name
        found.append(statement.states)
    assert [state.state for state in found[0]] == [StateId(0, 1), StateId(0, 2), StateId(1, 2)]
    assert len({state.digest for state in found[0]}) == 3
    assert found[0] == found[1]
