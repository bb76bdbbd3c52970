"""The parallel train step: strategies store, gather and reduce parameters; schedules run microbatches in an order."""
