"""The planner: layouts of a configuration on a cluster, ranked by predicted seconds, with reasons."""
