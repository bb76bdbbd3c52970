"""Schedules, one a file: a function of the type `jaxdist.parallel.schedule.Schedule`."""
