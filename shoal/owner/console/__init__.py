"""The owner's requests to the aggregator through the broker.

- Each request takes a number, under the fleet's lock and durable before it is sent: no two requests share one.
- An answer counts only if the aggregator signed it, for this request's transfer id, under a key made for this request alone.
- Without an answer the state is unknown, and the error says whether broker or aggregator is silent.

`numbers` has the numbers, `asking` one request over any transport, `connection` the same on an MQTT connection that lasts for
one command, and `words` the answers as lines for people.

Example: `shoal-fleet run pause DIR 2` takes number 8, sends the request, and prints the run as the aggregator has it now.
"""
