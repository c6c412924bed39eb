"""Attacks on the round of statistics: `made` has the devices' vectors, `reading` the attacks on them, `rows` the report's rows.

Each attack is run on vectors under the mask alone, where it succeeds, and on vectors behind the dense matrix that fleets use.
"""
