"""The lab: the papers' experiments, the benchmarks and the attacks on masks. No program of a fleet needs it.

- `experiments` has the tables and figures of the papers, and fleets that nobody arranged: ``shoal simulate`` and ``shoal data``.
- `bench` measures the real code, `bench.attacks` attacks it, and `bench.privacy` compares the mask modes: ``shoal bench``.
- The lab may import every package of Shoal; none imports the lab. `shoal` finds these commands by their entry points.

Example: ``shoal bench privacy --quick`` prints each attack's success beside chance.
"""
