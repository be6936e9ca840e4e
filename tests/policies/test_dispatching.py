"""A split in the dispatcher: which workers sample which groups, and what becomes of those whose arm is gone."""

from hypothesis import given
from hypothesis import strategies as st

from streamrl.policies.dispatching import SeveralPolicyDispatch, continuing_arm, sampling_arm
from streamrl.policies.splitting import arm_of
from streamrl.producers.dispatch.dispatcher import build_order, build_reorder
from streamrl.producers.dispatch.scheduler import PendingPrompt, Schedulers
from streamrl.producers.dispatch.settings import DispatchSettings
from streamrl.producers.dispatch.state import DispatchState
from streamrl.producers.lengths.predictor import ConstantLength
from streamrl.schemas.control import ArmShare, PolicySplit
from streamrl.schemas.settings import LoopSettings
from streamrl.schemas.trajectories import LengthEstimate, Prompt
from tests.producers.dispatch.dispatcher_harness import heartbeat, step_report, version

LOOP = LoopSettings(
    groups_per_step=64, num_generations=2, max_staleness=4, max_completion_length=100, heartbeat_timeout_s=10.0
)
ESTIMATE = LengthEstimate(median=10, upper=10, bucket=0, predictor="test")
SHARES = {"rloo": 0.5}


def harness(**shares: float) -> tuple[DispatchState, Schedulers]:
    """Two workers of the served policy and one of arm rloo, at version 5 of its own."""
    settings = DispatchSettings()
    predictor = ConstantLength(LOOP)
    state = DispatchState(LOOP, settings, predictor, policies=SeveralPolicyDispatch())
    state.observe(step_report(40), 0.0)
    for worker in ("w0", "w1"):
        state.observe(heartbeat(worker, number=40), 0.0)
    state.observe(heartbeat("w2", number=5).replace(policy="rloo"), 0.0)
    state.observe(split_of(**shares), 0.0)
    return state, Schedulers(state, settings)


def split_of(**shares: float) -> PolicySplit:
    arms = tuple(ArmShare(policy=name, share=share) for name, share in shares.items())
    return PolicySplit(sequence=1, sent_at=0.0, arms=arms, workers=dict.fromkeys(("w2",), "rloo") if shares else {})


def pending(*positions: int) -> list[PendingPrompt]:
    return [
        PendingPrompt(n, Prompt(prompt_id=f"toy/{n}", dataset="toy", content="question"), f"toy/{n}/0", ESTIMATE)
        for n in positions
    ]


def send_all(state: DispatchState, scheduler: Schedulers, now: float = 0.0) -> dict[int, tuple[str, str]]:
    """By position: the worker and the policy of its order."""
    scheduler.begin_turn(now)
    if scheduler.wants_plan():
        scheduler.adopt(scheduler.planner()())
    sent = {}
    while (found := scheduler.next()) is not None:
        prompt, worker = found
        order = build_order(LOOP, prompt, worker, created_at=state.created_at(now), due_step=0, seed=None)
        state.admit(order, worker, now)
        scheduler.sent(worker)
        assert order.admitted_version == version(40), "ages are counted in served versions"
        sent[prompt.position] = (order.worker_id, order.policy)
    return sent


def test_each_group_goes_to_a_worker_of_its_arm_and_all_of_a_window_are_sent() -> None:
    state, scheduler = harness(**SHARES)
    scheduler.begin_turn(0.0)
    assert scheduler.wanted() == 64
    scheduler.add(pending(*range(40)))
    sent = send_all(state, scheduler)
    assert sorted(sent) == list(range(40))
    for position, (worker, policy) in sent.items():
        assert policy == arm_of(f"toy/{position}/0", SHARES)
        assert (worker == "w2") == (policy == "rloo")
    assert {worker for worker, _ in sent.values()} == {"w0", "w1", "w2"}


def test_unsent_orders_of_an_arm_go_to_the_served_policy_when_its_workers_or_the_split_end() -> None:
    for is_over in (False, True):
        state, scheduler = harness(**SHARES)
        scheduler.begin_turn(0.0)
        scheduler.add(pending(*range(40)))
        now = 11.0  # beyond the lease of w2
        for worker in ("w0", "w1"):
            state.observe(heartbeat(worker, number=40).replace(sequence=10**9), now)
        if is_over:
            state.observe(heartbeat("w2", number=5).replace(policy="rloo", sequence=10**9), now)
            state.observe(split_of(), now)
        sent = send_all(state, scheduler, now)
        assert sorted(sent) == list(range(40))
        assert {policy for _, policy in sent.values()} == {""}
        assert scheduler.unsent == 0


def test_a_worker_that_adopts_for_a_moment_keeps_its_arm_s_groups() -> None:
    state, scheduler = harness(**SHARES)
    state.observe(heartbeat("w2", number=5, awaits=version(6)).replace(policy="rloo", sequence=10**9), 1.0)
    scheduler.begin_turn(1.0)
    scheduler.add(pending(*range(40)))
    assert {policy for _, policy in send_all(state, scheduler, 1.0).values()} == {""}
    assert scheduler.unsent
    assert scheduler.wanted() == 0  # a window is sent before the next is drawn
    state.observe(heartbeat("w2", number=6).replace(policy="rloo", sequence=10**9 + 1), 2.0)
    assert {policy for _, policy in send_all(state, scheduler, 2.0).values()} == {"rloo"}
    assert scheduler.unsent == 0


def test_missing_samples_stay_with_their_arm_while_it_has_workers() -> None:
    state, scheduler = harness(**SHARES)
    scheduler.begin_turn(0.0)
    scheduler.add(pending(*range(40)))
    sent = send_all(state, scheduler)
    position = next(at for at, (_, policy) in sent.items() if policy == "rloo")
    flight = state.flights.get(f"toy/{position}/0")
    assert flight is not None
    there = state.fleet.policies(0.0)
    assert state.policies.continuing(flight.order, there) == "rloo"
    assert continuing_arm(flight.order, {}, frozenset({""})) == ""
    own = state.choose(2, lambda held: True, 0.0, "w0", "rloo")
    other = state.choose(2, lambda held: True, 0.0, "w0", "")
    assert own is not None
    assert other is not None
    assert [build_reorder(flight, worker).policy for worker in (own, other)] == ["rloo", ""]


@given(st.text("abc/0123456789", min_size=1), st.sets(st.sampled_from(["", "rloo", "long"])))
def test_a_group_is_held_back_only_without_workers(group: str, there: set[str]) -> None:
    shares = {"rloo": 0.3, "long": 0.3}
    arm = sampling_arm(group, shares, there)
    assert arm in there or not there
    assert arm_of(group, shares) not in there or arm == arm_of(group, shares)
