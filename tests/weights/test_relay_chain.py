from hypothesis import given
from hypothesis import strategies as st

from streamrl.schemas.identifiers import PolicyVersion
from streamrl.schemas.messages import WIRE_VERSION
from streamrl.schemas.reports import RelayBeat
from streamrl.weights.relay.chain import RelayMember, RelayMembership, chain_of, upstreams
from tests.coordinator.factories import relay_beat

VERSION = PolicyVersion(1, 7)


@st.composite
def fleets(draw: st.DrawFn) -> list[RelayMember]:
    """One to three stores and up to twelve relays, of up to three sites, some of which hold the version."""
    stores, others = draw(st.integers(1, 3)), draw(st.integers(0, 12))
    sites = draw(st.lists(st.sampled_from("abc"), min_size=stores + others, max_size=stores + others))
    whole = draw(st.lists(st.booleans(), min_size=stores + others, max_size=stores + others))
    names = draw(st.permutations(range(stores + others)))
    return [
        RelayMember(
            f"r{names[number]:02}",
            f"http://r{names[number]}",
            site=site,
            has_store=number < stores,
            held=frozenset({VERSION} if held else ()),
        )
        for number, (site, held) in enumerate(zip(sites, whole, strict=True))
    ]


def who_lacks_it(fleet: list[RelayMember]) -> list[RelayMember]:
    return [member for member in fleet if not member.holds(VERSION)]


@given(fleet=fleets(), data=st.data())
def test_relays_never_wait_for_each_other(fleet: list[RelayMember], data: st.DataObject) -> None:
    """Whatever part of the fleet each of them knows, and whomever it has given up."""
    waits_for: dict[str, set[str]] = {}
    for me in who_lacks_it(fleet):
        known = data.draw(st.sets(st.sampled_from(fleet)), label="known") | {me}
        gone = data.draw(st.sets(st.sampled_from([member.relay_id for member in fleet])), label="gone")
        # Any of them may be the one, by the time that those before it are given up.
        found = upstreams(me.relay_id, known, VERSION, gone)
        assert me not in found
        waits_for[me.relay_id] = {member.relay_id for member in found if not member.holds(VERSION)}
    while free := [name for name, others in waits_for.items() if not others & waits_for.keys()]:
        for name in free:
            del waits_for[name]
    assert waits_for == {}


@given(fleet=fleets(), data=st.data())
def test_every_relay_has_an_upstream(fleet: list[RelayMember], data: st.DataObject) -> None:
    stores = [member.relay_id for member in fleet if member.has_store]
    kept = data.draw(st.sampled_from(stores))
    gone = data.draw(st.sets(st.sampled_from([member.relay_id for member in fleet]))) - {kept}
    for me in who_lacks_it(fleet):
        found = [member.relay_id for member in upstreams(me.relay_id, fleet, VERSION, gone)]
        assert kept in found
        assert not gone & set(found)


@given(fleets())
def test_a_version_crosses_into_each_site_once_and_each_relay_serves_few(fleet: list[RelayMember]) -> None:
    fresh = [
        RelayMember(member.relay_id, member.address, site=member.site, has_store=member.has_store) for member in fleet
    ]
    pairs = [(me, upstreams(me.relay_id, fresh, VERSION)[0]) for me in who_lacks_it(fresh)]
    sites = {me.site for me, _ in pairs} - {member.site for member in fresh if member.has_store}
    crossings = [me.site for me, upstream in pairs if me.site != upstream.site]
    assert sorted(crossings) == sorted(sites)
    # One behind it at its own site, and one of the next.
    assert all(sum(upstream is member for _, upstream in pairs) <= 2 for member in fresh)


@given(fleets())
def test_a_late_relay_fetches_from_a_neighbour_that_holds_the_version(fleet: list[RelayMember]) -> None:
    for me in who_lacks_it(fleet):
        near = [member for member in fleet if member.site == me.site and member.holds(VERSION)]
        if near:
            assert upstreams(me.relay_id, fleet, VERSION)[0].site == me.site


def test_an_arm_s_weights_have_a_chain_of_their_own() -> None:
    """Who holds those of one policy may lack another's."""
    fleet = [
        RelayMember("s", "s", has_store=True),
        RelayMember("a", "a", held=frozenset({VERSION})),
        RelayMember("b", "b"),
        RelayMember("c", "c", held=frozenset({VERSION})),
        RelayMember("d", "d", of_series=frozenset({("rloo", VERSION)})),
    ]
    for arm, expected in (("", ["a", "s", "c"]), ("rloo", ["a", "s", "d"]), ("long", ["a", "s"])):
        assert [member.relay_id for member in upstreams("b", fleet, VERSION, series=arm)] == expected


def beat(sequence: int, *, incarnation: str = "a", leaving: bool = False, wire: int = WIRE_VERSION) -> RelayBeat:
    return relay_beat(
        sequence=sequence, incarnation=incarnation, address="http://r1", held=(VERSION,), leaving=leaving, wire=wire
    )


def test_a_relay_is_there_while_it_beats_and_until_it_leaves() -> None:
    members = RelayMembership(timeout_s=5.0)
    members.observe("r1", beat(0), 0.0)
    assert [member.relay_id for member in members.living(5.0)] == ["r1"]
    members.observe("r1", beat(0), 4.0)  # a repeat is no sign of life
    assert members.living(6.0) == []
    members.observe("r1", beat(0, incarnation="b"), 7.0)
    assert members.living(8.0)[0].holds(VERSION)
    members.observe("r1", beat(1, incarnation="b", leaving=True), 9.0)
    assert members.living(9.0) == []
    members.observe("r1", beat(2, wire=WIRE_VERSION + 2), 10.0)
    assert members.living(10.0) == []


def test_a_heartbeat_reports_the_versions_held_of_arms() -> None:
    members = RelayMembership(timeout_s=5.0)
    members.observe("r1", beat(0).replace(held_of_arms={"rloo": (VERSION,)}), 0.0)
    (found,) = members.living(0.0)
    assert (found.holds(VERSION, "rloo"), found.holds(VERSION, "long")) == (True, False)


def test_the_chain_is_stores_then_site_by_site() -> None:
    fleet = [RelayMember(name, name, site=site, has_store=name == "s") for name, site in ("sb", "cb", "ba", "aa", "db")]
    assert [member.relay_id for member in chain_of(fleet)] == ["s", "a", "b", "c", "d"]
