"""The run that a device follows: its signed package, the policy that follows from it, and the jobs of its rounds.

- The plan must be signed by the pinned owner; task and origins must be sealed under the fleet's content key.
- `policy` rejects every announcement, assignment and model that the plan does not allow.
- New state is durable before the old state is erased, so that a power cut leaves one or the other.

`package` opens a run package, `following` decides which run and mask epoch is in force, `models` collects the models of
a round, `jobs` makes the job of an assignment, `rollover` changes to the next mask epoch.

Example: the broker delivers a retained package; `package.open_run` checks signature and task and derives the mask key;
`following` stores it and puts it in force.
"""
