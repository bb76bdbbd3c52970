"""One source a file: `<name>.py` defines `<name>(config: DataConfig) -> Source`. The folder is the registry."""
