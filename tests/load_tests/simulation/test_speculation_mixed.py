"""Drafts under the mixed load, with steps as measured: prompts hardly wait for them."""

from engine.speculation.rules import SpeculationRules
from load_tests.mixed_load import MixedLoad
from load_tests.simulation.speculation_mixed import figures


def test_drafts_save_time_a_token_and_delay_no_prompt() -> None:
    load = MixedLoad(rate=24.0, duration_s=6.0, seed=0)
    rules = SpeculationRules(max_drafts=3, first_drafts=3)
    plain, drafted = (figures(load, acceptance, [7], rules) for acceptance in (None, 0.69))
    ratios = {name: drafted[name] / plain[name] for name in plain}
    assert ratios["tpot_p50_ms"] < 0.65
    for name in ("short_ttft_p50_ms", "short_ttft_p90_ms", "long_ttft_p50_ms"):
        assert ratios[name] < 1.05, f"{name}: {ratios[name]:.2f}"
