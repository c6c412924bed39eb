"""`shoal bench poison`: what three attackers among ten devices do to the honest ones, under each robust rule.

`fleets` deals the data, `attacks` are what the attackers do, `benchmark` runs every attack under every rule, and `page` writes
the tables of docs/poison.md from a kept result.

Example: ``shoal bench poison --data digits --attack sign-flip`` compares the rules under one attack in half a minute.
"""
