"""What a program will do, read from the traced program before anything runs: its communication, round by round."""

from jaxdist.plan.traced.rounds import Message, Round, counted, read_rounds, received, rounds_of, sent

__all__ = ["Message", "Round", "counted", "read_rounds", "received", "rounds_of", "sent"]
