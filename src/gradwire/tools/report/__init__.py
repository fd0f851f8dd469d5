"""Measured runs as a page or as markdown."""
