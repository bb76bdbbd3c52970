"""Exit statuses and signal timing that processes, launcher and watch agree on."""

DONE, FAILED = 0, 1
WRONG = 2  # a mistake of the user: the same command would fail again
STOPPED = 75  # stopped, and the same command resumes
SAME_S = 1.0  # launchers, schedulers and terminals may send one signal twice
