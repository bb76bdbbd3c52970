"""Starting up: platform, processes, devices; and stopping."""
