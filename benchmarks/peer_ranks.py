"""One rank of `peers.py`: the ways in which other packages average gradients, as their documentation says to use them.

Each is a `shaped.Run`: the same model, data and steps, and the same measurement of bytes, error and time. A package
that has no hook for DDP averages between backward and the optimizer, as its users do.
"""

from __future__ import annotations

import argparse
import importlib
import os
from abc import abstractmethod
from collections.abc import Callable
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

import gradwire.optim
import rounds
import shaped
from rounds import BATCH, WIDTH

SYNC_EVERY = 20
"""The steps between two averages of DiLoCo, and the steps of a round."""
PORT = 29600


class Peer(shaped.Run):
    """A package that is no comm hook. Subclasses set `model`, which has a `module`, and average in `step`."""

    def __init__(self, name: str, job: dict[str, Any]) -> None:
        rounds.Run.__init__(self, name)
        self.option = name.partition(":")[2]
        torch.manual_seed(1 + dist.get_rank())
        self.data = torch.randn(BATCH, WIDTH)
        self.identical: bool | None = None
        self.state = None
        module = rounds.mlp()
        try:
            self.make(module, job)
        except Exception as error:
            self.failed = f"fails at the start: {type(error).__name__}: {str(error).strip().splitlines()[0][:120]}"

    @abstractmethod
    def make(self, module: nn.Module, job: dict[str, Any]) -> None:
        """Set the package up around a model."""

    @property
    def grads(self) -> list[Tensor]:
        """The gradients, in the order of the parameters."""
        return [param.grad for param in self.model.parameters() if param.grad is not None]


class AfterBackward(Peer):
    """Averages all gradients once backward is done."""

    def make(self, module: nn.Module, job: dict[str, Any]) -> None:
        """No wrapper."""
        self.model = Bare(module)
        self.average = self.averager(list(module.parameters()))

    @abstractmethod
    def averager(self, params: list[nn.Parameter]) -> Callable[[], None]:
        """What replaces the gradients by their mean."""

    def step(self) -> None:
        """Forward, backward and the average."""
        super().step()
        self.average()


class Bare(nn.Module):
    """A model that nothing averages."""

    def __init__(self, module: nn.Module) -> None:
        super().__init__()
        self.module = module

    def forward(self, data: Tensor) -> Tensor:
        """What the model does."""
        result: Tensor = self.module(data)
        return result


class EpfmlPowerSGD(AfterBackward):
    """github.com/epfml/powersgd, by the authors of the paper: `epfml:rank=4`."""

    def averager(self, params: list[nn.Parameter]) -> Callable[[], None]:
        """`aggregate` returns the mean and leaves the error in the gradients it was given."""
        from powersgd import Config, PowerSGD

        config = Config(rank=int(self.option.removeprefix("rank=")), start_compressing_after_num_steps=0)
        reducer, errors = PowerSGD(params, config=config), [torch.zeros_like(param) for param in params]

        def average() -> None:
            with torch.no_grad():
                for error, grad in zip(errors, self.grads, strict=True):
                    error.add_(grad)
                for grad, mean in zip(self.grads, reducer.aggregate(errors), strict=True):
                    grad.copy_(mean)

        return average


class Grace(AfterBackward):
    """github.com/sands-lab/grace: `grace:qsgd`, `grace:fp16`."""

    def averager(self, params: list[nn.Parameter]) -> Callable[[], None]:
        """Tensor after tensor."""
        from grace_dl.dist.helper import grace_from_params

        communicator = "allreduce" if self.option == "fp16" else "allgather"
        settings = {"compressor": self.option, "communicator": communicator, "world_size": dist.get_world_size()}
        grace = grace_from_params(settings)

        def average() -> None:
            for index, grad in enumerate(self.grads):
                grad.copy_(grace.step(grad, str(index)))

        return average


class DeepSpeed(Peer):
    """DeepSpeed without ZeRO: `deepspeed:bf16` is its `communication_data_type`."""

    def make(self, module: nn.Module, job: dict[str, Any]) -> None:
        """An engine averages in `backward`, which it refuses without an optimizer. That one takes no step here."""
        os.environ.update(DS_ACCELERATOR="cpu", LOCAL_RANK="0")
        import deepspeed

        # Shared memory is not there between hosts, and takes a minute to compile. (`deepspeed.comm.torch` is torch.)
        importlib.import_module("deepspeed.comm.torch").build_shm_op = lambda: None  # type: ignore[attr-defined]
        deepspeed.init_distributed("gloo", auto_mpi_discovery=False)
        settings = {"train_micro_batch_size_per_gpu": BATCH, "communication_data_type": self.option}
        optimizer = torch.optim.SGD(module.parameters(), lr=0.0)
        self.model, *_ = deepspeed.initialize(model=module, optimizer=optimizer, config=settings)

    def step(self) -> None:
        """Forward, and DeepSpeed's backward."""
        self.model.module.zero_grad()
        self.model.backward(self.model(self.data).square().mean())


class TorchFT(Peer):
    """torchft: `torchft:ddp`, `torchft:ddp-quantized`, `torchft:diloco`. Every rank is a replica of its own."""

    def make(self, module: nn.Module, job: dict[str, Any]) -> None:
        """A lighthouse on the first host, a manager on each."""
        from torchft.coordination import LighthouseServer
        from torchft.manager import Manager
        from torchft.process_group import ProcessGroupGloo

        rank, host = dist.get_rank(), f"10.77.0.{dist.get_rank() + 1}"
        if rank == 0:
            self.lighthouse = LighthouseServer(bind=f"0.0.0.0:{PORT}", min_replicas=dist.get_world_size())
        dist.barrier()
        self.store = dist.TCPStore(host, PORT + 1, is_master=True, wait_for_workers=False)
        self.manager = Manager(
            pg=ProcessGroupGloo(timeout=timedelta(seconds=60)),
            load_state_dict=module.load_state_dict,
            state_dict=module.state_dict,
            min_replica_size=dist.get_world_size(),
            use_async_quorum=self.option != "diloco",
            rank=0,
            world_size=1,
            store_addr=host,
            store_port=PORT + 1,
            lighthouse_addr=f"http://10.77.0.1:{PORT}",
            replica_id=f"host{rank}",
            hostname=host,
            init_sync=False,  # the replicas start equal
        )
        self.diloco(module) if self.option == "diloco" else self.ddp(module)

    def ddp(self, module: nn.Module) -> None:
        """Its own DDP; `ddp-quantized` passes `should_quantize`, which its DDP has no option for."""
        from torchft import ddp

        class Quantized(ddp.DistributedDataParallel):  # type: ignore[misc]
            @staticmethod
            def _comm_hook(state: Any, bucket: Any) -> Any:
                work = state.allreduce(bucket.buffer(), should_quantize=True)
                work.wait()
                return work.get_future()._fut

        self.model = (ddp.DistributedDataParallel if self.option == "ddp" else Quantized)(self.manager, module)

    def diloco(self, module: nn.Module) -> None:
        """Local SGD with an outer optimizer."""
        from torchft.local_sgd import DiLoCo

        self.model = Bare(module)
        self.inner = torch.optim.SGD(module.parameters(), lr=1e-4)
        outer = torch.optim.SGD(module.parameters(), lr=0.7, momentum=0.9, nesterov=True)
        self.wrapper = DiLoCo(self.manager, [module], self.inner, outer, sync_every=SYNC_EVERY, pin_memory=False)
        self.wrapper.__enter__()

    def warm_up(self) -> None:
        """DiLoCo averages parameters, so that there is no error of a mean gradient."""
        local_warm_up(self) if self.option == "diloco" else super().warm_up()

    def fit(self, seconds: float) -> None:
        """A round of DiLoCo has one average."""
        self.steps = SYNC_EVERY
        if self.option != "diloco":
            super().fit(seconds)

    def step(self) -> None:
        """With the quorum and the vote that make it fault tolerant."""
        if self.option == "diloco":
            super().step()
            self.inner.step()
            return
        self.manager.start_quorum()
        super().step()
        if not self.manager.should_commit():
            raise RuntimeError("torchft did not commit a step")


class OurDiLoCo(Peer):
    """gradwire's DiLoCo, beside torchft's: `diloco:exact`."""

    def make(self, module: nn.Module, job: dict[str, Any]) -> None:
        """The same settings. Without a delay, so that no bytes of a round are counted in that of another row."""
        self.model = Bare(module)
        self.inner = torch.optim.SGD(module.parameters(), lr=1e-4)
        self.wrapper = gradwire.optim.DiLoCo(module, self.inner, sync_every=SYNC_EVERY, exchange=self.option, delay=0)
        self.wrapper.__enter__()

    def warm_up(self) -> None:
        """It averages parameters."""
        local_warm_up(self)

    def fit(self, seconds: float) -> None:
        """A round has one average."""
        self.steps = SYNC_EVERY

    def step(self) -> None:
        """A step of the inner optimizer."""
        super().step()
        self.inner.step()


def local_warm_up(run: Peer) -> None:
    """One whole round."""
    for _ in range(SYNC_EVERY):
        run.step()


KINDS: dict[str, Callable[[str, dict[str, Any]], rounds.Run]] = {
    "epfml": EpfmlPowerSGD,
    "grace": Grace,
    "deepspeed": DeepSpeed,
    "torchft": TorchFT,
    "diloco": OurDiLoCo,
}


def make(name: str, job: dict[str, Any]) -> rounds.Run:
    """A peer, or a hook of gradwire's or torch's."""
    return KINDS.get(name.partition(":")[0], shaped.Run)(name, {"bucket_mb": None, **job})


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__)
    rounds.add_arguments(parser, rounds=1)
    rounds.run_rank(parser.parse_args(), make)
