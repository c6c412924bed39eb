"""The public simulator: `simulate.simulate` checks its arguments, runs the engine and returns a `result.Result`."""
