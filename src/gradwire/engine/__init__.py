"""The engine: runs exchanges beside the backward pass. `docs/engine.md` follows one gradient through it."""
