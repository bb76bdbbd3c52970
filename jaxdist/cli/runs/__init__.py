"""Commands about one run: train it, time it, look at its profile, report and checkpoints."""
