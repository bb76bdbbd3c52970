"""The sections of a report, by subject."""
