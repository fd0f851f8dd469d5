import json
import statistics

import pytest
import torch
from torch import nn
from torch.nn.parallel import DistributedDataParallel

from gradwire.errors import SpecError
from gradwire.testing import spawn_ranks
from gradwire.tools.cli import main
from gradwire.tools.cli.headroom import to_text
from gradwire.tools.launch import RunFailed
from gradwire.tools.launch.link import PAYLOAD, Link
from gradwire.tools.measure import alternate
from gradwire.tools.measure import headroom as measuring
from gradwire.tools.measure.alternate import ORDER, UNSEEN, WARM_UP, Alternating, Clock, alternating_hook, communicates
from gradwire.tools.measure.headroom import Headroom, headroom, median_interval

from ..fake_time import TimelessLink


def measured(with_ms, without_ms):
    return Headroom(
        with_s=tuple(value / 1e3 for value in with_ms),
        without_s=tuple(value / 1e3 for value in without_ms),
        ranks=2,
        link=None,
        wanted_steps=80,
    )


def by_kind(steps_ms):
    kinds = [communicates(at) for at in range(len(steps_ms))]
    with_ms, without_ms = (
        [time for time, one in zip(steps_ms, kinds, strict=True) if one == kind] for kind in (True, False)
    )
    return measured(with_ms, without_ms)


def test_below_a_tenth_is_not_network_bound():
    found = measured([100] * 20, [91] * 20)
    assert found.exposed == pytest.approx(0.09)
    assert found.ceiling == pytest.approx(100 / 91)
    assert not found.is_network_bound
    assert found.verdict().startswith("Not network-bound: communication takes 9% of a step, less than 10%")
    assert "more than 1.10x as fast" in found.verdict()


def test_from_a_tenth_it_is():
    found = measured([100] * 24, [50] * 24)
    assert found.is_network_bound
    assert found.is_certain
    assert found.verdict() == (
        "Network-bound: communication takes 50% of a step, and a hook can make this training up to 2.00x as fast."
    )
    assert "exposed communication              50.00  50.0% of a step (95%: 50.0% to 50.0%)" in to_text(found)
    assert json.loads(json.dumps(found.as_dict()))["without_communication"]["quartiles_s"] == [0.05, 0.05]


def test_drift_that_hits_both_kinds_alike_does_not_show():
    steps = [100 + 3 * at for at in range(80)]
    assert by_kind(steps).exposed == pytest.approx(0, abs=1e-3)


@pytest.mark.parametrize(("period", "phase"), [(2, 0), (2, 1), *((4, phase) for phase in range(4)), (8, 5)])
def test_what_a_script_does_every_few_steps_does_not_show(period, phase):
    """Stepping the optimizer after some backward passes, say."""
    found = by_kind([40 if at % period == phase else 20 for at in range(80)])
    assert found.exposed == pytest.approx(0, abs=0.03)


def test_few_steps_are_not_certain():
    found = measured([100] * 6, [50] * 6)
    assert not found.is_certain
    assert "The steps are too few to be certain" in found.verdict()
    assert "(seen: 50.0% to 50.0%)" in to_text(found)


def test_spread_over_the_bound_is_said():
    found = measured([100, 100, 130, 130, 80, 80, 150, 150], [91] * 8)
    assert not found.is_certain
    assert found.verdict().endswith("measure more of them with --steps 160.")


def test_faster_with_communication_is_a_ceiling_of_one():
    found = measured([99] * 8, [100] * 8)
    assert found.ceiling == 1
    assert found.exposed < 0
    assert "takes 0% of a step" in found.verdict()


def test_the_interval_holds_the_median_and_narrows():
    generator = torch.Generator().manual_seed(0)
    few, many = (torch.randn(count, generator=generator).tolist() for count in (20, 2000))
    assert median_interval(few)[0] < statistics.median(few) < median_interval(few)[1]
    assert median_interval(many)[1] - median_interval(many)[0] < 0.2
    samples = torch.randn(400, 20, generator=generator).tolist()
    held = [low < 0 < high for low, high in map(median_interval, samples)]
    assert statistics.mean(held) > 0.92


def test_too_few_steps_are_refused():
    with pytest.raises(SpecError, match="steps must be at least 8, got 7"):
        headroom(steps=7)


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["--steps", "1"], "steps must be at least 8, got 1"),
        (["--link", "fast"], "link 'fast'"),
        (["nosuch.py"], "script 'nosuch.py' does not exist"),
        (["--nproc", "0"], "the number of ranks must be between 1 and"),
        (["--nproc", "100000"], "the number of ranks must be between 1 and"),
        (["--nproc", "1"], "nproc is 1: there is no communication to measure; take --nproc 2 or more"),
        (["--nproc", "1", "--nnodes", "1"], "nproc is 1: there is no communication to measure"),
    ],
)
def test_bad_input_has_a_short_message(capsys, words, message):
    assert main(["headroom", *words]) == 2
    printed = capsys.readouterr()
    assert message in printed.err
    assert (printed.err.count("\n"), printed.out) == (1, "")


def test_one_rank_here_is_right_where_there_are_other_nodes(monkeypatch):
    started = []
    monkeypatch.setattr(measuring, "follow", lambda plan, script, *ranks, enough: started.append(ranks))
    with pytest.raises(RunFailed, match="never built"):
        headroom(nproc=1, torchrun=["--nnodes=2", "--node-rank=0"])
    assert started == [(1, ["--nnodes=2", "--node-rank=0"])]


def test_the_result_is_printed_at_once_and_stays_if_the_script_fails_later(monkeypatch, capsys):
    """A script may train for hours after the last timed step, and be interrupted then."""

    def fails(plan, *_, enough):
        plan.write(plan.new_note("times"), {"rank": 0, "ranks": 2, "times": [0.1] * 8, **UNSEEN._asdict()})
        enough()
        assert "exposed communication" in capsys.readouterr().out
        raise RunFailed("ValueError: in the end")

    monkeypatch.setattr(measuring, "follow", fails)
    assert main(["headroom", "--nproc", "2", "--steps", "8", __file__]) == 1
    printed = capsys.readouterr()
    assert (printed.out, printed.err.splitlines()[-1]) == ("", "gradwire: error: ValueError: in the end")


def test_a_script_that_fails_right_after_its_last_timed_step_has_its_result(monkeypatch):
    def fails(plan, *_, enough):
        plan.write(plan.new_note("times"), {"rank": 0, "ranks": 2, "times": [0.1] * 8, **UNSEEN._asdict()})
        raise RunFailed("at the end")

    told = []
    monkeypatch.setattr(measuring, "follow", fails)
    with pytest.raises(RunFailed, match="at the end"):
        headroom(steps=8, tell=told.append)
    assert [len(found.with_s) for found in told] == [4]


ALONE = """
import torch, torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel
dist.init_process_group("gloo", init_method="file://" + __file__ + ".store", rank=0, world_size=1)
DistributedDataParallel(torch.nn.Linear(8, 8))
print("trained")
"""


def test_a_script_that_is_alone_ends_when_it_builds_its_model(tmp_path, capfd, forked_ranks):
    path = tmp_path / "train.py"
    path.write_text(ALONE)
    assert main(["headroom", str(path)]) == 1
    printed = capfd.readouterr()
    assert printed.out == ""
    assert printed.err.endswith(
        "RegisterError: the model's process group has one rank: there is no communication to measure; take --nproc 2 "
        "or more\n"
    )


# -- the training stays what it was --------------------------------------------------------------------------------


class Net(nn.Module):
    """Dropout and BatchNorm, a layer that is never used and one that is used now and then."""

    def __init__(self, *, odd):
        super().__init__()
        self.first = nn.Sequential(nn.Linear(33, 129), nn.BatchNorm1d(129), nn.Dropout(0.3), nn.Linear(129, 65))
        self.second = nn.Linear(65, 65)
        self.never = nn.Linear(7, 7) if odd else nn.Identity()

    def forward(self, x, *, short):
        return self.first(x) if short else self.second(self.first(x))


SETTINGS = {
    "many buckets": ({"bucket_cap_mb": 0.02}, {}),
    "unused": ({"find_unused_parameters": True, "bucket_cap_mb": 0.02}, {"odd": True}),
    "views": ({"gradient_as_bucket_view": True}, {}),
    "static": ({"static_graph": True, "bucket_cap_mb": 0.02}, {}),
    "accumulating": ({}, {"accumulate": True}),
}


def train(rank, ddp, *, clock=None, link=None, odd=False, accumulate=False):
    torch.manual_seed(0)
    model = DistributedDataParallel(Net(odd=odd), **ddp)
    if clock is not None:
        model.register_comm_hook(Alternating(model, clock, link), alternating_hook)
    optimizer = torch.optim.AdamW(model.parameters(), 1e-2)
    torch.manual_seed(rank)
    for step in range(WARM_UP + len(ORDER) + 2):
        optimizer.zero_grad()
        if accumulate:
            with model.no_sync():
                model(torch.randn(16, 33), short=False).square().mean().backward()
        model(torch.randn(16, 33), short=odd and step % 3 == 0).square().mean().backward()
        optimizer.step()
    return model.module.state_dict()


def compare(rank, size):
    """Whether every setting ends in the same bits, what was published, and how much a slow link exposes."""
    same, published = {}, []
    for name, (ddp, options) in SETTINGS.items():
        plain = train(rank, ddp, **options)
        timed = train(rank, ddp, clock=Clock(4, lambda times, came_s: published.append(list(times))), **options)
        same[name] = all(torch.equal(value, timed[key]) for key, value in plain.items())
    return same, published, on_a_slow_link(rank)


def on_a_slow_link(rank):
    """Step times on a clock that only the emulated link moves on."""
    link, slow = TimelessLink(Link(10e6)), []
    alternate.now = lambda device: link.clock.now
    train(rank, {}, clock=Clock(4, lambda times, came_s: slow.append(list(times))), link=link)
    return slow[-1]


def test_the_training_is_the_same_bit_for_bit():
    (same, published, slow), *others = spawn_ranks(3, compare, timeout_s=500)
    assert same == dict.fromkeys(SETTINGS, True)
    assert [len(times) for times in published] == [4] * len(SETTINGS)
    assert all(other[1:] == (published, slow) for other in others)
    numel = sum(value.numel() for key, value in Net(odd=False).named_parameters())
    link_s = 4 * numel * 2 * 2 / 3 * 8 / 10e6 / PAYLOAD
    assert slow == pytest.approx([link_s if with_ else 0.0 for with_ in ORDER], rel=0.01, abs=1e-9)


SCRIPT = """
import torch, torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel
dist.init_process_group("gloo")
torch.manual_seed(0)
ours, reference = torch.nn.Linear(64, 64), torch.nn.Linear(64, 64)
reference.load_state_dict(ours.state_dict())
model = DistributedDataParallel(ours)
torch.manual_seed(dist.get_rank())
for step in range(20):
    inputs = torch.randn(4, 64)
    for net, called in ((ours, model), (reference, reference)):
        called(inputs).square().mean().backward()
        for param in net.parameters():
            if net is reference:
                dist.all_reduce(param.grad.mul_(0.5))
            param.data.sub_(param.grad)
            param.grad = None
assert all(torch.equal(*pair) for pair in zip(ours.parameters(), reference.parameters()))
assert model._comm_hooks[0][0].__name__ == "alternating_hook"
if dist.get_rank() == 0:
    print("trained to the end")
"""


def test_a_script_is_timed_and_trains_to_its_end(tmp_path, capfd, forked_ranks):
    path = tmp_path / "train.py"
    path.write_text(SCRIPT)
    code, printed = main(["headroom", "--nproc", "2", "--steps", "8", "--json", str(path)]), capfd.readouterr()
    assert code == 0, printed.err
    found = json.loads(printed.out)  # what the script prints goes elsewhere
    assert "trained to the end" in printed.err
    assert (found["ranks"], found["with_communication"]["steps"], found["without_communication"]["steps"]) == (2, 4, 4)
    assert found["is_network_bound"] == (found["exposed"] >= 0.1)
    assert "gradwire headroom: " in printed.err
