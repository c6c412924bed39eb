"""The aggregator's files: SQLite for facts, append-only files for masked vectors.

- An upload is acknowledged only after `Store.commit`, which makes vectors durable first and then the rows that name them.
- After a crash the open round is replayed from the store: same uploads, same order, same bits.
- The database grows by one short record a round; uploads to which the strategy's state does not refer are deleted.
- Damaged files raise an `IntegrityError` that names the run's directory; a full or failing disk, a `StorageError`.

`store` holds a run's state and reads it for other processes, `vector_log` its updates, `records` its closed rounds,
`signed_runs` the owner's run files and orders.

Example: ``write`` and ``append`` for each upload that arrived together, one ``commit``, then their acknowledgements.
"""
