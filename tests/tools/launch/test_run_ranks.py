import pytest

from gradwire.errors import SpecError
from gradwire.tools.launch.launch import RunFailed, run_ranks, threads_each
from gradwire.tools.measure.grid import measure
from gradwire.tools.records.records import Settings

from . import targets


def run(function, **options):
    return run_ranks(f"{targets.__name__}:{function.__name__}", 2, {"start": 10}, timeout_s=300, **options)


def test_results_come_in_the_order_of_the_ranks():
    reports = []
    results = run(targets.add_up, report=lambda *report: reports.append(report))
    assert [result["rank"] for result in results] == [0, 1]
    assert {result["total"] for result in results} == {21.0}
    assert {result["threads"] for result in results} == {threads_each(2)}
    assert (0.0, "starting 2 processes") in reports
    assert (0.5, "adding") in reports


def test_an_error_shows_the_traceback_of_the_rank_that_made_it_once(forked_ranks):
    with pytest.raises(RunFailed) as caught:
        run(targets.fail_on_rank_1)
    text = str(caught.value)
    assert text.startswith("rank 1 failed:\nTraceback")
    assert text.endswith("ValueError: no such luck")
    assert text.count("Traceback") == 1


def test_a_rank_that_dies_is_named_with_its_last_words(forked_ranks):
    with pytest.raises(RunFailed, match="rank 1 was killed by SIGKILL") as caught:
        run(targets.die_on_rank_1)
    assert str(caught.value).endswith("rank 1 was here")


def test_more_ranks_than_make_sense_here_are_refused():
    for start in (
        lambda count: run_ranks("no:where", count, {}),
        lambda count: measure(["exact"], Settings(nproc=count)),
    ):
        with pytest.raises(SpecError, match=r"number of ranks must be between 1 and \d+ on a machine with \d+ cores"):
            start(100_000)


@pytest.mark.parametrize(("hooks", "message"), [(["fp17"], "Did you mean 'fp16'"), ([], "no hook to measure")])
def test_measure_refuses_what_it_cannot_do_before_it_starts_anything(hooks, message):
    with pytest.raises(SpecError, match=message):
        measure(hooks)
