"""The aggregator's files: SQLite for facts, append-only files for masked vectors.

- An upload is acknowledged only after `Store.commit`, which makes vectors durable first and then the rows that name them.
- After a crash the open round is replayed from the store: same uploads, same order, same bits.
- The database grows by one short record a round; uploads that no strategy refers to are deleted.
- Damaged files raise an `IntegrityError` that names the run's directory; a full or failing disk, a `StorageError`.

`store` is a run's state, `vector_log` its vectors, `records` its closed rounds, `run_status` the view of other processes,
`signed_runs` the owner's run files, `fsync_worker` waits for the disk beside the loop, `corruption` maps errors.

Example: ``append`` for each upload that arrived together, one ``commit``, then their acknowledgements.
"""
