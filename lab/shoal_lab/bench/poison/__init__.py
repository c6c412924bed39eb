"""`shoal bench poison`: what attackers do to the honest devices of their fleet, under each robust rule.

- Three of ten devices attack, or one to three of twenty for a backdoor; mask, weights and limits are a fleet's defaults.
- The accuracy is the honest devices' alone; without an attack it is that of all ten.
- A backdoor's success is the share of the honest devices' test images of other classes that get its label once they bear its
  trigger.
- An attack sees what a device sees: its own data, key and update, or with ALIE also the honest updates' mean and deviation.

`attacks` are what the attackers do, `benchmark` deals the data and runs every attack under every rule, and `page` writes the
tables of docs/poison.md from kept results.

Example: ``shoal bench poison --data digits --attack sign-flip`` compares the rules under one attack in half a minute.
"""
