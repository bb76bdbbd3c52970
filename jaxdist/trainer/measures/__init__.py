"""What is measured of a run: its seconds, the share of the peak, memory, bytes sent."""
