"""What may cross the network, and nothing else: types, messages, codec, topics, limits, errors, transports."""
