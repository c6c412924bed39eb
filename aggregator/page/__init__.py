"""The fleet page of a running aggregator, over HTTP: `/`, `/events`, `/report.html`, `/metrics`, `/healthz`, `/readyz`.

    access.py          where the server listens, and who may ask: loopback addresses, or a bearer token
    feed.py            from the loop's facts and the stored rounds to the snapshot that all requests read: `Feed`
    metrics.py         a snapshot as Prometheus metrics
    server.py          the HTTP server: few connections, small requests, deadlines; `FleetPage` starts and ends all of it
    home_assistant.py  counts of a snapshot as sensors of Home Assistant, over the fleet's broker

Rules:

1. The daemon's loop hands over one immutable value a second and never waits. All other work happens in threads of the page, and
   only for a request.
2. The state of the fleet is the record of `shoal-aggregator status`: page, metrics and command can't disagree.
3. The page can be read only. No request changes anything.
4. Away from loopback every answer but `/healthz` and `/readyz` needs the token. On loopback the ``Host`` must be a loopback name,
   so that no web page elsewhere can read it through the browser of this machine.
5. A failure of the page never ends the daemon.

Example: ``shoal-aggregator serve server --http 127.0.0.1:9464``, then a browser on http://127.0.0.1:9464.
"""
