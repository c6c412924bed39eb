"""The keeper: a small server that lets the aggregator open sums of updates, and never one update.

Devices seal to it the seeds of the pads on their updates (`crypto.sums`). At the close of a round the aggregator asks for the sum
of the pads of each cell, and the keeper answers if the rules of `shoal.protocol.sums` allow that. It never has a word of an
update, a mask or a model.

- answer.py: one request and its answer, a pure function of the roster, the plan and what was opened before.
- memory.py: what was opened, durable before an answer leaves.
- service.py: a keeper on a transport; daemon.py and cli.py: the program ``shoal-keeper``.

Whoever has the aggregator *and* the keeper has every update, as an aggregator without a keeper has; so they belong to two
parties, or on two machines. A keeper that cheats can refuse, or give wrong pads: then the sum is noise, and is not used. Its
memory is in no backup: a restored one would open a second partition of a round. A lost keeper is replaced in the next run.

Example: the aggregator asks for cells of five and four devices in round 7, crashes, and asks again; it gets the same answer. A
request for four of the five is refused.
"""
