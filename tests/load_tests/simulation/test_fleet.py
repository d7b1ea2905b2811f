"""Placement over arrays decides as `place` does, reasons and predictions included."""

from hypothesis import given, settings
from hypothesis import strategies as st

from configs.schema import LapsConfig
from engine.cost_model import PRIOR
from engine.length_class import LengthClass, LinearCost
from engine.messages import RouteRequest
from engine.routing.placement import PlacementRules, route
from load_tests.simulation.fleet import LABEL_CODES, Decoders, FastPlacement, Prefillers

SECONDS = st.sampled_from([0.0, 0.005, 0.01, 0.02, 0.05, 0.3]) | st.floats(0.0, 2.0)
LABEL_NAMES: list[LengthClass | None] = [None, "short", "long"]


@st.composite
def prefillers(draw: st.DrawFn, *, is_unified: bool) -> Prefillers:
    num = draw(st.integers(1, 9))
    fleet = Prefillers([f"prefill-{i}" for i in range(num)], is_unified=is_unified)
    for i in range(num):
        fleet.is_alive[i] = draw(st.integers(0, 5)) > 0
        fleet.queued_tokens[i] = draw(st.integers(0, 3000))
        fleet.queued_s[i] = draw(SECONDS)
        fleet.num_waiting[i] = draw(st.integers(0, 5))
        fleet.has_short[i] = draw(st.booleans())
        fleet.num_short[i] = draw(st.integers(0, int(fleet.num_waiting[i])))
        fleet.short_s[i] = draw(SECONDS)
        fleet.labels[i] = LABEL_CODES[draw(st.sampled_from(LABEL_NAMES))]
    return fleet


@st.composite
def decoders(draw: st.DrawFn) -> Decoders:
    num = draw(st.integers(1, 5))
    fleet = Decoders([f"decode-{i}" for i in range(num)])
    for i in range(num):
        fleet.is_alive[i] = draw(st.integers(0, 4)) > 0
        fleet.num_running[i] = draw(st.integers(0, 4))
        fleet.num_blocks[i] = draw(st.integers(1, 300))
        fleet.num_free_blocks[i] = draw(st.integers(0, int(fleet.num_blocks[i])))
    return fleet


@st.composite
def rules(draw: st.DrawFn) -> PlacementRules:
    deadlines = st.sampled_from([None, 0.02, 0.3])
    laps = LapsConfig(
        laps_alloc_threshold=draw(st.sampled_from([64, 256, 1000])),
        max_step_ms=draw(st.sampled_from([5.0, 50.0])),
        spill_margin_s=draw(st.sampled_from([0.0, 0.02])),
        short_ttft_deadline_s=draw(deadlines),
        long_ttft_deadline_s=draw(deadlines),
    )
    cost = PRIOR if draw(st.booleans()) else LinearCost()
    return PlacementRules(laps=laps, cost=cost)


@settings(max_examples=60, deadline=None)
@given(data=st.data(), is_unified=st.booleans(), rules=rules())
def test_every_decision_is_the_one_that_place_makes(
    data: st.DataObject, is_unified: bool, rules: PlacementRules
) -> None:
    fleet = data.draw(prefillers(is_unified=is_unified))
    others = None if is_unified else data.draw(decoders())
    names = fleet.names + (others.names if others else [])
    fast = FastPlacement(rules, fleet, others)
    for _ in range(4):
        prompt = RouteRequest(
            num_prompt_tokens=data.draw(st.sampled_from([1, 40, 256, 257, 2000])),
            max_queued_tokens=data.draw(st.sampled_from([None, None, 4000])),
            avoid=data.draw(st.lists(st.sampled_from(names), max_size=3)),
            ttft_deadline_s=data.draw(st.sampled_from([None, 0.05, 1.0])),
        )
        columns = st.integers(0, len(fleet.names) - 1)
        hits = data.draw(st.dictionaries(columns, st.sampled_from([16, 240, 1984, 4000])))
        snapshots = [fleet.snapshot(i, hits.get(i, 0)) for i in range(len(fleet.names))]
        if others:
            snapshots += [others.snapshot(i) for i in range(len(others.names))]
        assert fast.route(prompt, hits) == route(prompt, snapshots, 0.0, rules)
