"""The aggregator on several machines: a coordinator, and workers that each hold one part of every vector.

Who does what
-------------

- The *coordinator* is the aggregator of the fleet: engine, strategy, SQLite, exactly once. It never holds a vector.
- A *worker* has an identity of its own, which the owner signs into the run plan. It takes its part of each update from the
  device, stores it, reports it, and at the close of a round computes on its coordinates what the coordinator asks for.

Rules
-----

1. An upload is acknowledged when the coordinator has its header and all workers have reported their parts
   (`aggregator.uploads.uploads`).
2. At the close of a round the strategy runs at the coordinator as it always does, on `aggregator.numerics.parted.PartedVector`.
   What it needs of the numbers themselves, products and norms, are sums over coordinates: each worker computes its own
   (`calculation`), in blocks, and the coordinator adds them up in the order of the workers. So the same round closed again
   gives the same bits.
3. Closing changes nothing until it is complete. If a worker is lost meanwhile, the close is computed again once it is back.
4. Workers make their parts of the means, store them, and publish them when the coordinator announces the next round.

With no workers in the plan nothing here runs: the vectors are arrays, and the aggregator is one process.

Example: three workers and 20 devices of 159,010 coordinates. A device sends each worker 53,000 coordinates and the coordinator
a header with three digests. The close of a CFL round asks the workers for the products of 20 updates: 400 numbers from each.
"""
