"""The models that a device holds: states, the recipes that make them, their files and checkpoints.

- A state is (model, round): the model after the close of that round. It is immutable, and its digest names its bits.
- All devices evaluate a recipe to the same bits. A device whose digest differs is *out of step* and takes a checkpoint.
- A device holds the states that it needs, and those of them that a later recipe may name; `recipes.catch_up` decides which.
- The key chain has moved on, durably, before anything leaves that is masked with a round's keys. The keys are erased once
  the states of the round are durable.

`recipes` compares states with the retained steps and evaluates, `states` are the values in memory, `store` holds
states and keys on disk, `checkpoints` seals a state for other devices and opens it. `private_values` holds the coordinates of
a private segment, which are no part of any state. The package imports neither the runtime nor the transport.

Example: a device that holds state 6 of model 0 reads the step of round 7, applies it and signs the new state's digest.

    >>> import numpy as np
    >>> from crypto.mask.schedule import VersionKey
    >>> from edge_client.models.recipes import catch_up
    >>> from edge_client.models.states import ModelStates
    >>> from shoal.protocol.states import StateRecipe, StateId, Step, Term
    >>> chain = VersionKey("reef", 1, bytes(32)).begin_run(bytes(16), first_round=1)
    >>> states = ModelStates.of_origins({0: np.zeros(2, np.float32)}, chain.take())
    >>> step = Step(2, (StateRecipe(0, 2, (Term(0, 0, 1.0),), mean=1.0),), open=(StateId(0, 2),))
    >>> plan = catch_up(states.digests(), [step], wanted={StateId(0, 2)}, has_keys=lambda round_: round_ >= 2)
    >>> mean = np.array([0.5, -1], np.float32)
    >>> states = states.apply(plan.steps[0], {0: mean}, chain.take()).keep(plan.keep)
    >>> [(held.model, held.round) for held in states.statement("pi-07", 3).states], plan.missing
    ([(0, 2)], ())
"""
