"""`shoal bench poison`: what three attackers among ten devices do to the honest ones, under each robust rule.

- Three of ten devices attack; mask, weights and limits are a fleet's defaults.
- The accuracy is the honest devices' alone; without an attack it is that of all ten.
- An attack sees what a device sees: its own data, key and update, or with ALIE also the honest updates' mean and deviation.

`fleets` deals the data, `attacks` are what the attackers do, `benchmark` runs every attack under every rule, and `page` writes
the tables of docs/poison.md from kept results.

Example: ``shoal bench poison --data digits --attack sign-flip`` compares the rules under one attack in half a minute.
"""
