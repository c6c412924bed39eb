"""The restart of a loopback broker, with or without what it keeps."""

from shoal.transport.base import Disconnected


def restart(broker, *, keep=True):
    """Disconnect all clients without wills and let them reconnect; ``keep`` preserves sessions and retained messages."""
    online = [session for session in broker._sessions.values() if session.online]
    for session in broker._sessions.values():
        session.online = False
        broker._lost_s[session.transport.client_id] = broker.now_s
        if not keep:
            session.filters.clear()
            session.backlog.clear()
    if not keep:
        broker.retained.clear()
    for session in online:
        session.transport.report(Disconnected("the broker restarted"))
        session.transport.start()
