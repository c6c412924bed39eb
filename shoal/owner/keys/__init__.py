"""The owner's directory on disk: keys, secrets, roster, grants, run numbers and broker passwords.

- Files that hold secrets have mode 0600, and may be encrypted under a passphrase (`vault`, `unlock`).
- New secrets and the roster that goes with them take effect together: a journal is written first and replayed after a
  crash.
- Secrets are drawn at init, rotation, revocation and restore, and at admission once a run is signed.
- Each run number is used once; `FleetDirectory.take_run` makes that durable before it returns.
- Output for other machines goes to a folder elsewhere: `outputs` refuses one inside this directory.

`directory` is the fleet, `broker_users` its passwords at the broker, `run_list` the runs that were signed.

Example: `FleetDirectory.revoke` draws new secrets, journals them with the next roster, replaces both files, rewrites the
grants of the remaining parties and then removes the journal.
"""
