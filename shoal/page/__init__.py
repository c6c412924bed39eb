"""The fleet page: one self-contained HTML file with the state of a fleet and the pictures of its runs.

    tree.py      which devices were together in which rounds: `ClusterTree`
    history.py   a run's closed rounds in a size that does not grow with them: `RunHistory`
    page.py      data and assets as one HTML document, live or as a still, and its Content-Security-Policy
    assets/      the document, its style and its script; no library, no build step

Rules:

1. The page sends no request, except in its live form to the server that it came from.
2. Text of devices and owners is data: the script writes it with ``textContent`` alone, and JSON in the document has no ``<``.
3. The size of the data is bounded by the constants of history.py and tree.py, for any number of rounds, and for any fleet but
   for one row a device.
4. Every picture has a table with the same figures.

The aggregator serves the live page; `shoal-fleet report` and `shoal demo --open` write stills. All use
the records of rounds as `aggregator.rounds.state.RoundRecord` has them, in the form of JSON.

Example: a still of a run of one round.

    >>> from shoal.page.history import RunHistory
    >>> from shoal.page.page import still
    >>> run = RunHistory(name="run 1", algorithm="fedavg", rounds=1)
    >>> run.add({"round": 1, "loss": 0.5, "contributed": 2, "ordered": 2, "clusters": {"dev-1": 0, "dev-2": 0}})
    >>> still("reef", [run.document()]).startswith(b"<!doctype html>")
    True
"""
