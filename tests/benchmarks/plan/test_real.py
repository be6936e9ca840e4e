import pytest

from benchmarks.plan.__main__ import summary
from benchmarks.plan.real import CASES, ENDS, LONGEST, RealCase, RealEngine, letters
from streamrl.planning.planner import measured_settings, with_recorded_lengths
from streamrl.producers.generation.engines.length_trace import trace_length
from streamrl.producers.generation.engines.model_files import read_facts
from streamrl.schemas.profiles import CoreCosts, DecodeSettings, DeviceProfile, TrainingCosts
from streamrl.settings.loading import load_settings

PROFILE = DeviceProfile(
    device="a device",
    model="a model",
    engine="transformers",
    max_num_seqs=32,
    decode=DecodeSettings(table=((1, 0.004), (32, 0.008)), prefill_s=0.002),
    training=TrainingCosts(forward_backward_s_per_token=3e-5),
)


@pytest.fixture(scope="module")
def engine(tmp_path_factory: pytest.TempPathFactory) -> RealEngine:
    return RealEngine("transformers", "python", tmp_path_factory.mktemp("plan"), "localhost:1", steps=6)


def test_the_model_ends_by_itself_at_about_every_sixty_fourth_token(engine: RealEngine) -> None:
    facts = read_facts(str(engine.model), None)
    assert set(facts.ends.texts) == set(ENDS)
    assert facts.vocab_size / len(ENDS) == 64
    assert facts.max_length > LONGEST + 96


@pytest.mark.parametrize("case", CASES, ids=lambda case: case.name)
def test_every_case_is_a_run_that_can_be_predicted_with_measured_times(engine: RealEngine, case: RealCase) -> None:
    settings = load_settings(engine.config(case, "test", seed=0), [])
    assert (settings.loop.mode, settings.run.workers) == (case.mode, case.workers)
    with with_recorded_lengths(measured_settings(settings, PROFILE, PROFILE), [7, 7, 7]) as expected:
        assert expected.emulation.decode == PROFILE.decode
        assert expected.emulation.training == PROFILE.training
        assert trace_length(expected.emulation.lengths, "any/0", 0, None) == 7
    assert settings.emulation.decode != PROFILE.decode


def test_the_engine_is_predicted_to_wait_while_its_worker_works_on_a_trajectory(engine: RealEngine) -> None:
    settings = load_settings(engine.config(CASES[0], "test", seed=0), [])
    profile = PROFILE.model_copy(update={"cores": CoreCosts(number=2, worker_s_per_trajectory=0.003)})
    decode = measured_settings(settings, profile, profile).emulation.decode
    assert decode == PROFILE.decode.model_copy(update={"prefill_s": 0.005})


def test_samples_differ_in_reward_so_that_all_are_trained() -> None:
    assert letters(["ab", "a1", "12", ""]) == [1.0, 0.5, 0.0, 0.0]


def test_only_cases_that_fit_the_machine_judge_a_prediction() -> None:
    rows = [
        {"engine": "vllm", "fits": True, "error": -0.04},
        {"engine": "vllm", "fits": True, "error": 0.02},
        {"engine": "vllm", "fits": False, "error": 0.5},
    ]
    assert summary(rows) == [{"engine": "vllm", "cases": 2, "mean": 0.03, "worst": -0.04}]
