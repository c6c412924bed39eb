"""Attacks on masks by the structure of a network, under a fresh key in each round and, for comparison, one key a run.

- The attacker is the aggregator alone: it has no device and no initial model, but knows the architecture and public images.
- `coordinates` looks for the hidden unit of each coordinate, or for units under a rotation, `images` for images, `linking` for
  the same coordinate under two keys; `units` groups coordinates and scores the groups.
- `fleet` simulates devices that apply their own checks to what is announced; true keys and models are used for scoring only.

Example: under a permutation ``images`` kills every hidden unit by a constant, revives one, and reads the image in its gradient.
"""
