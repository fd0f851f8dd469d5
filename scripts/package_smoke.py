"""Uses an installed gradwire as a stranger would: run by scripts/package.py in an environment that has little else."""

import importlib.util
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from importlib import metadata
from pathlib import Path

TRAIN = """
import torch, torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel
dist.init_process_group("gloo")
model = DistributedDataParallel(torch.nn.Linear(64, 64))
for _ in range(3):
    model(torch.randn(8, 64)).square().mean().backward()
dist.destroy_process_group()
"""


def main(extra: str) -> None:
    """Import, average on two ranks, train a script, and see what the extra brings."""
    import torch

    import gradwire
    from gradwire.testing import thread_ranks

    assert Path(gradwire.__file__).is_relative_to(sys.prefix), gradwire.__file__
    assert gradwire.__version__ == metadata.version("gradwire")
    means = thread_ranks(2, lambda rank: rank.mean("int8", [torch.full((512,), 1.0 + rank.rank)]).flat)
    assert all(torch.allclose(mean, torch.tensor(1.5), rtol=0.01) for mean in means)

    fast = importlib.util.find_spec("numba") is not None
    assert fast == (extra == "fast"), "numba comes with the extra `fast`, and with nothing else"
    assert gradwire.kernels.in_use(torch.device("cpu")) == ("numba" if fast else "torch")

    with tempfile.TemporaryDirectory() as folder:
        script = Path(folder, "train.py")
        script.write_text(TRAIN)
        trained = command("run", "--hook", "int8", "--nproc", "2", str(script))
        check_sinks(Path(folder), installed=extra == "metrics")
    assert "int8 averaged 3 steps on 2 ranks" in trained.stderr, trained.stderr
    assert command("--version").stdout.strip() == f"gradwire {gradwire.__version__}"
    completion = command("completion", "bash", check=False)
    assert (completion.returncode == 0) == (extra == "cli"), completion.stderr
    assert extra == "cli" or "gradwire[cli]" in completion.stderr, completion.stderr


def check_sinks(folder: Path, *, installed: bool) -> None:
    """With the extra `metrics` its sinks write a record, and without it they name the extra."""
    from gradwire.metrics import MLflow, Record, Sink, TensorBoard, WandB

    os.environ["MLFLOW_ALLOW_FILE_STORE"] = "true"
    makers: list[Callable[[], Sink]] = [
        lambda: TensorBoard(folder / "board"),
        lambda: WandB(mode="offline", dir=folder),
        lambda: MLflow(experiment="smoke", tracking_uri=(folder / "mlflow").as_uri()),
    ]
    for make in makers:
        if not installed:
            assert "gradwire[metrics]" in refusal(make), "sinks need the extra `metrics`"
            continue
        sink = make()
        sink.open()
        sink.write(Record(1, time.time(), "int8", "", {"sent_bytes": 8.0}))
        sink.close()


def refusal(make: "Callable[[], object]") -> str:
    """What the error says; empty if there is none."""
    from gradwire import GradwireError

    try:
        make()
    except GradwireError as error:
        return str(error)
    return ""


def command(*words: str, check: bool = True) -> "subprocess.CompletedProcess[str]":
    """Run the installed `gradwire`."""
    program = str(Path(sys.prefix, "bin", "gradwire"))
    done = subprocess.run([program, *words], capture_output=True, text=True, timeout=300)
    assert not check or done.returncode == 0, done.stderr
    return done


if __name__ == "__main__":
    main(sys.argv[1])
