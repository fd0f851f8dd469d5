"""A byte-level GPT of 0.5M parameters on the source of Python's standard library: AdamW, Muon, or SGD with momentum."""

from common import options, run_on_text

from gradwire.tools.workload import GPT, WorkloadSettings

SETTINGS = WorkloadSettings(layers=2, width=128)


def main() -> None:
    """Train."""
    args = options(__doc__, optimizer="adamw", lr=2e-3)
    run_on_text(args, lambda: GPT(SETTINGS), batch=8, length=SETTINGS.context + 1)


if __name__ == "__main__":
    main()
