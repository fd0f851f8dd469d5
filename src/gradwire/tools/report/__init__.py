"""Measured runs as a page, as markdown and as a recommendation."""
