"""What a step will do, before a launch: explanation, budget, remedies."""
