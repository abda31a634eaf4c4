"""Whether weights and KV caches fit where workers are to run. The planner of `lab` computes with the same formulas."""
