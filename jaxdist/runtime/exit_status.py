"""Exit statuses and signal timing that processes, launcher and watch agree on."""

STOPPED = 75  # exit status: stopped, and the same command resumes
SAME_S = 1.0  # launchers, schedulers and terminals may send one signal twice
