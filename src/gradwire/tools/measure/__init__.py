"""Measures the link, the compute and the hooks, and predicts step times from them."""
