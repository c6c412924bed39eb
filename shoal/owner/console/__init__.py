"""The owner's requests to the aggregator through the broker.

    numbers.py      the numbers of requests, by which the aggregator recognises a repeated one
    asking.py       one request and its answer, over any transport: `Question`
    connection.py   the same on an MQTT connection that lasts for one command: `ask`
    words.py        answers as lines for people

Example: `shoal-fleet run pause DIR 2` takes number 8, sends the request, and prints the run as the aggregator has it now.
"""
