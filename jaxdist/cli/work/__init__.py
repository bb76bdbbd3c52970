"""The work of the commands explain, plan, checkpoint and doctor, once their arguments are read."""
