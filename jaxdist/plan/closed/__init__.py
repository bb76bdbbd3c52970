"""Closed forms of a configuration: bytes, FLOPs and memory of a device, without tracing its step."""
