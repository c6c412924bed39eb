"""`shoal bench privacy`: what each mask mode costs, what the aggregator can compute under it, and which attacks succeed.

`benchmark` runs everything and prints it, `cost` measures masks and the aggregator's computations, `page` writes the HTML page.

Example: ``shoal bench privacy --quick --mode rotation --html rotation.html`` attacks the default mode and draws its pictures.
"""
