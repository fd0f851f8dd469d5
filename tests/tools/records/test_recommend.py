"""The one rule that decides which hook to use."""

import pytest

from gradwire.tools.records.recommend import Option, recommend

ERRORS = {"exact": 3e-8, "bf16": 1e-3, "int8": 5e-3, "int4": 7e-2, "sign": 0.5}


def option(hook, ms, spread=0.0, **changes):
    quartiles_s = (ms / 1e3 * (1 - spread), ms / 1e3 * (1 + spread)) if spread else None
    return Option(hook=hook, step_s=ms / 1e3, error=ERRORS[hook], quartiles_s=quartiles_s, **changes)


def chosen(ceiling=None, **times_ms):
    return recommend([option(hook, ms) for hook, ms in times_ms.items()], ceiling=ceiling).hook


def test_the_smallest_error_within_3_percent_of_the_fastest_wins():
    assert chosen(exact=200, bf16=102.9, int8=102, int4=100) == "bf16"
    assert chosen(exact=200, bf16=103.1, int8=102, int4=100) == "int8"
    assert chosen(exact=200, bf16=120, int8=110, int4=100) == "int4"


def test_a_hook_pays_from_10_percent_on():
    assert chosen(exact=109, int8=100) is None
    assert chosen(exact=111, int8=100) == "int8"
    assert chosen(exact=111, int8=100, bf16=102) == "int8"  # bf16 is near the fastest, but it does not pay by itself


@pytest.mark.parametrize(("ceiling", "hook"), [(1.10, None), (1.12, "int8"), (None, "int8")])
def test_without_network_bound_steps_nothing_pays(ceiling, hook):
    assert chosen(ceiling, exact=200, int8=100) == hook


def test_a_gain_within_the_spread_does_not_count():
    wide, narrow = ([option("exact", 120, spread), option("int8", 100, spread)] for spread in (0.1, 0.08))
    assert recommend(wide).hook is None
    assert recommend(wide).reason == (
        "The median step under int8 is 1.20x as fast as under exact, but the steps differ too much from each other to "
        "be sure. Measure again on a quiet machine."
    )
    assert recommend(narrow).hook == "int8"


def test_hooks_within_the_uncertainty_of_the_fastest_are_a_tie_and_the_smaller_error_wins():
    def found(uncertainty):
        times_ms = {"exact": 200, "bf16": 108, "int8": 104, "int4": 100}
        return recommend([option(hook, ms, uncertainty=uncertainty) for hook, ms in times_ms.items()])

    assert [found(uncertainty).hook for uncertainty in (0.0, 0.02, 0.03, 0.06)] == ["int4", "int4", "int8", "bf16"]
    assert found(0.06).reason == (
        "A step takes 108.0 ms instead of 200.0 ms with exact: it is 1.85x as fast. The error of the averaged gradient "
        "is 0.001, the smallest of a tie: the 100.0 ms of int4, the fastest, differ from it by less than the "
        "uncertainty of 8%."
    )


def test_an_excluded_hook_is_named_but_never_recommended():
    fast = option("sign", 50, excluded="loss too high")
    best = recommend([option("exact", 100), option("int8", 80), fast], ceiling=2.5)
    assert (best.title, best.code) == ("Use int8", 'gradwire.register(ddp_model, "int8")')
    assert best.reason == (
        "A step takes 80.0 ms instead of 100.0 ms with exact: it is 1.25x as fast, and no hook can make it more than "
        "2.50x as fast. The error of the averaged gradient is 0.005, the smallest among the hooks within 3% of the "
        "fastest. Faster, but excluded: sign (loss too high)."
    )
    alone = recommend([option("exact", 100), fast])
    assert (alone.hook, alone.title, alone.code) == (None, "Do not compress", "")
    assert alone.reason == "Every hook that makes a step at least 1.10x as fast is excluded: sign (loss too high)."


def test_every_refusal_says_why():
    options = [option("exact", 100), option("int8", 60)]
    assert str(recommend(options, ceiling=1.05)) == (
        "Do not compress. The training is not network-bound. A step takes 100.0 ms with exact and would take 95.2 "
        "ms without communication: communication takes 4.8% of it, and below 10% no hook pays."
    )
    assert recommend(options, ceiling=0.9).title == "Too noisy to say"
    assert recommend(options[1:]).reason == "There is no measurement of exact to compare with."
    assert recommend(options[:1], ceiling=2.0).reason == (
        "No hook makes a step at least 1.10x as fast as exact does. Without communication it would be 2.00x as fast."
    )
