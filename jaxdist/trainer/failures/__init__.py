"""What a run does when a step fails: NaNs, memory, ranks with another program."""
