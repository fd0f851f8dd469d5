"""Measured runs as records: in memory, in files and as text."""
