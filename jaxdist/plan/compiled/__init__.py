"""Facts of compiled programs: HLO, memory, schedules; compiling for GPUs that are not there."""
