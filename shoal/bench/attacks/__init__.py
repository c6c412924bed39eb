"""Attacks on masked updates, each from a source and with an attacker who is named; ``registry`` lists them."""
