import itertools

import pytest
import torch

from gradwire.errors import GradwireError, SpecError
from gradwire.tools.workload import (
    HELD_OUT_EVERY,
    Workload,
    WorkloadSettings,
    even_windows,
    library_text,
    random_windows,
)

SMALL = WorkloadSettings(layers=1, width=32, heads=2, context=32, batch=4, text_bytes=2_000_000, eval_windows=6)


pytestmark = pytest.mark.usefixtures("one_thread")


def workload(seed=0, rank=0, size=2, settings=SMALL):
    return Workload(settings, seed=seed, rank=rank, size=size)


def test_a_batch_depends_on_seed_rank_and_step_alone():
    assert torch.equal(workload().batch(3), workload().batch(3))
    batches = [workload(seed, rank).batch(step) for seed, rank, step in itertools.product(range(2), repeat=3)]
    assert batches[0].shape == (4, 33)
    for one, other in itertools.combinations(batches, 2):
        assert not torch.equal(one, other)


def test_a_model_depends_on_the_seed_alone():
    one, same, other = (workload(seed, rank).model().state_dict() for seed, rank in ((0, 0), (0, 1), (1, 0)))
    assert all(torch.equal(one[name], same[name]) for name in one)
    assert not torch.equal(one["head.weight"], other["head.weight"])


def test_the_global_generator_is_left_alone():
    before = torch.get_rng_state()
    work = workload()
    work.optimizer(work.model())
    work.batch(0)
    assert torch.equal(torch.get_rng_state(), before)


def test_windows_are_pieces_of_the_text():
    source = torch.arange(100, dtype=torch.uint8)
    for windows in (random_windows(source, 50, 7, 0), even_windows(source, 50, 7)):
        assert windows.shape == (50, 7)
        assert torch.equal(windows - windows[:, :1], torch.arange(7).expand(50, 7))
    assert even_windows(source, 3, 10)[:, 0].tolist() == [0, 45, 90]


def test_the_default_model_is_small():
    params = sum(param.numel() for param in workload(settings=WorkloadSettings()).model().parameters())
    assert 1e6 <= params <= 3e6


def test_a_byte_does_not_see_the_ones_after_it():
    model = workload().model()
    tokens = workload().batch(0)[:, :-1]
    changed = tokens.clone()
    changed[:, 20:] = (changed[:, 20:] + 1) % 256
    before, after = model(tokens), model(changed)
    assert torch.equal(before[:, :20], after[:, :20])
    assert not torch.equal(before[:, 20:], after[:, 20:])


def test_the_loss_falls():
    work = workload(size=1)
    model = work.model()
    optimizer = work.optimizer(model)
    first, count = work.held_out_loss(model)
    for step in range(40):
        optimizer.zero_grad()
        work.loss(model, work.batch(step)).backward()
        optimizer.step()
    assert count == SMALL.eval_windows
    assert first / count == pytest.approx(5.55, abs=0.2)  # ln 256: nothing is known yet
    assert work.held_out_loss(model)[0] / count < 4.0


def test_ranks_share_the_held_out_windows():
    model = workload().model()
    shares = [workload(rank=rank, size=4).held_out_loss(model) for rank in range(4)]
    whole, count = workload(size=1).held_out_loss(model)
    assert [share[1] for share in shares] == [2, 2, 1, 1]
    assert sum(share[0] for share in shares) == pytest.approx(whole, rel=1e-5)
    assert count == 6
    assert workload(rank=7, size=8).held_out_loss(model) == (0, 0)


def test_the_text_is_in_order_without_tests_and_held_out_by_file(tmp_path):
    for index in range(2 * HELD_OUT_EVERY):
        (tmp_path / f"m{index:02d}.py").write_bytes(b"%02d\n" % index)
    for folder in ("test", "site-packages", "pkg/tests"):
        (tmp_path / folder).mkdir(parents=True)
        (tmp_path / folder / "a.py").write_text("never")
    text = library_text(1000, tmp_path)
    assert bytes(text.held_out) == b"15\n31\n"
    assert bytes(text.train) == b"".join(b"%02d\n" % index for index in range(31) if index != 15)
    assert bytes(library_text(7, tmp_path).train) == b"00\n01\n0"


def test_a_python_without_sources_says_so(tmp_path):
    with pytest.raises(GradwireError, match="got 0; raise text_bytes, or use a Python"):
        random_windows(library_text(1000, tmp_path).train, 1, 33, 0)


@pytest.mark.parametrize(
    ("settings", "message"),
    [({"layers": 0}, "layers must be above 0, got 0"), ({"width": 30, "heads": 4}, "multiple of heads")],
)
def test_bad_settings_are_refused(settings, message):
    with pytest.raises(SpecError, match=message):
        WorkloadSettings(**settings)
