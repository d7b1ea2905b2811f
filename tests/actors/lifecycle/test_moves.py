"""Which workers a deployment has while nodes are drained: a pure decision."""

from collections.abc import Collection, Mapping

from hypothesis import given
from hypothesis import strategies as st

from actors.lifecycle.moves import Crew, choose_crew
from engine.messages import Role

HASH = "0a1b2c3d"
PAIR: dict[str, Role] = {f"prefill-0.{HASH}": "prefill", f"decode-0.{HASH}": "decode"}
P0, D0, D1 = f"prefill-0.{HASH}", f"decode-0.{HASH}", f"decode-1.{HASH}"


def choose(
    nodes: Mapping[str, str | None], *, ending: Collection[str] = ("b",), ready: Collection[str]
) -> Crew:
    """All workers that have a node, or wait for one, have an actor."""
    return choose_crew(PAIR, list(nodes), nodes, ending, ready)


def test_a_start_makes_what_the_configuration_says() -> None:
    crew = choose({}, ready=())
    assert crew == Crew(staying=PAIR, leaving={}, to_drain=[], surplus=[])


def test_a_worker_on_a_node_that_ends_goes_on_until_its_successor_is_ready() -> None:
    crew = choose({P0: "a", D0: "b"}, ready=(P0, D0))
    assert crew.staying == {P0: "prefill", D1: "decode"}
    assert (crew.leaving, crew.to_drain) == ({D0: "decode"}, [])
    starting = choose({P0: "a", D0: "b", D1: None}, ready=(P0, D0))
    assert (starting.leaving, starting.to_drain) == ({D0: "decode"}, [])
    assert choose({P0: "a", D0: "b", D1: "c"}, ready=(P0, D0, D1)).to_drain == [D0]


def test_a_worker_that_has_left_is_not_made_again_and_its_name_is_free() -> None:
    moved = choose({P0: "a", D1: "c"}, ready=(P0, D1))
    assert moved == Crew(staying={P0: "prefill", D1: "decode"}, leaving={}, to_drain=[], surplus=[])
    again = choose({P0: "a", D1: "c"}, ending=("c",), ready=(P0, D1))
    assert again.staying == PAIR
    assert again.leaving == {D1: "decode"}


def test_a_successor_without_a_place_is_given_up_when_the_node_has_ended() -> None:
    """Ray then looks for a place for the old worker too."""
    assert choose({P0: "a", D0: None, D1: None}, ready=(P0,)).surplus == [D1]
    assert choose({P0: "a", D0: None, D1: "c"}, ready=(P0, D1)).surplus == [D0]


@given(st.data())
def test_there_are_always_as_many_as_the_configuration_says(data: st.DataObject) -> None:
    counts = {"prefill": data.draw(st.integers(0, 3)), "decode": data.draw(st.integers(1, 3))}
    wanted: dict[str, Role] = {}
    for role in ("prefill", "decode"):
        wanted |= dict.fromkeys((f"{role}-{i}.{HASH}" for i in range(counts[role])), role)
    names = [f"{role}-{i}.{HASH}" for role in counts if counts[role] for i in range(6)]
    there = data.draw(st.lists(st.sampled_from(names), unique=True))
    nodes = {name: data.draw(st.sampled_from([None, "a", "b"])) for name in there}
    ready = [name for name in there if nodes[name] and data.draw(st.booleans())]
    crew = choose_crew(wanted, there, nodes, ["b"], ready)
    assert set(crew.leaving) == {name for name in there if nodes[name] == "b"}
    assert set(there) <= {*crew.roles, *crew.surplus}
    for role, num in counts.items():
        staying = [name for name in crew.staying if name.startswith(role)]
        assert len(staying) >= num
        assert len(staying) == num or set(staying) <= set(ready)
        if any(name.startswith(role) for name in crew.to_drain):
            assert sum(name in ready for name in staying) >= num
    assert not set(crew.surplus) & set(ready)
