"""The owner of a loopback fleet as a reader of its models."""

from shoal_lab.loopback.transport import LoopbackTransport

from shoal.owner.keys.run_list import signed_plans
from shoal.owner.models.reader import ModelReader


def reader_of(fleet, run=0):
    """Return a reader that has handled all that the fleet's broker retains for it."""
    owner = fleet.stage.fleet
    plans = signed_plans(owner, lambda _: None)
    transport = LoopbackTransport(fleet.broker, "reader", lambda event: reader.on_event(event, fleet.now_s))
    reader = ModelReader(owner, plans, transport, run)
    reader.start()
    transport.start()
    fleet.broker.pump()
    transport.close()
    return reader
