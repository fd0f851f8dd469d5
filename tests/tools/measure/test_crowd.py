"""How long work takes on cores that others use too, from what Linux counts for each thread."""

import pytest

from gradwire.tools.measure import crowd
from gradwire.tools.measure.crowd import Crowd, run_and_wait_s


@pytest.fixture
def threads(tmp_path, monkeypatch):
    """Counters of threads that are set by hand: seconds run and seconds waited, by thread."""
    monkeypatch.setattr(crowd, "TASKS", tmp_path)

    def count(**threads):
        for name, (run_s, wait_s) in threads.items():
            (tmp_path / name).mkdir(exist_ok=True)
            (tmp_path / name / "schedstat").write_text(f"{round(run_s * 1e9)} {round(wait_s * 1e9)} 7\n")

    return count


def test_the_factor_is_the_time_ready_to_run_by_the_time_run(threads):
    threads(main=(10.0, 3.0), other=(1.0, 1.0))
    measured = Crowd()
    assert measured.factor == 1.0
    measured.begin()
    threads(main=(12.0, 6.0), other=(3.0, 2.0))
    measured.end()
    assert measured.factor == pytest.approx(1 + 4 / 4)
    threads(main=(100.0, 100.0))  # not in a span
    measured.begin()
    threads(main=(104.0, 100.0))
    measured.end()
    assert measured.factor == pytest.approx(1 + 4 / 8)


def test_a_span_needs_a_beginning_and_threads_may_end(threads, tmp_path):
    measured = Crowd()
    measured.end()
    threads(main=(5.0, 5.0), other=(5.0, 5.0))
    measured.begin()
    (tmp_path / "other" / "schedstat").unlink()
    threads(main=(6.0, 5.0))
    measured.end()
    assert measured.factor == 1.0


def test_where_nothing_is_counted_nobody_waits(tmp_path, monkeypatch):
    monkeypatch.setattr(crowd, "TASKS", tmp_path / "none")
    measured = Crowd()
    measured.begin()
    measured.end()
    assert (run_and_wait_s(), measured.factor) == ((0.0, 0.0), 1.0)
