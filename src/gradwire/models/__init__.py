"""How a model is given a hook."""
