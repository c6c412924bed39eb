"""The run that a device follows: its signed package, the policy that follows from it, and the jobs of its rounds.

- The plan must be signed by the pinned owner; task and origins must be sealed under the content key of the run's round 0.
- `policy` rejects every announcement, assignment and mean that the plan does not allow.
- New state is durable before the old state is erased, so that a power cut leaves one or the other.

`following` decides which run is in force, `beginning` opens, stores and resumes it, `package` reads the owner's run package,
`held_models` brings the models up to each round, `jobs` makes the job of an assignment.

Example: the broker delivers a retained package; `beginning.open_run` checks the signatures and opens task and origins;
`following` stores the run and puts it in force.
"""
