import json
from pathlib import Path

from streamrl.bus.kafka.bus import KafkaBus
from streamrl.bus.kafka.settings import KafkaSettings
from streamrl.producers.generation.engines.length_trace import LengthTraceSettings, trace_length
from streamrl.schemas.evaluation import EvaluationReport
from streamrl.schemas.topics import EVALUATION_SAMPLES, EVALUATIONS, TRAJECTORIES
from streamrl.schemas.trajectories import Trajectory
from tests.pipeline.accounts import read_accounts, read_all
from tests.pipeline.emulated import CONFIG, NAME, EmulatedRun
from tests.pipeline.local_run import LocalRun


async def test_the_whole_pipeline_runs_without_a_model(emulated_run: EmulatedRun) -> None:
    accounts = await read_accounts(emulated_run.servers, NAME)
    assert [report.step for report in accounts.steps] == [1, 2, 3, 4]
    assert len(accounts.trained) == 4 * 8 * 4
    assert set(accounts.trained.values()) == {1}
    assert not accounts.dead_letters
    assert {version.name for version in (emulated_run.directory / "weights").iterdir()} >= {"1-3", "1-4"}
    for report in accounts.steps:
        assert report.metrics["emulated/train_s"] > 0
    await _lengths_and_times_are_those_of_the_settings(emulated_run.servers)


async def _lengths_and_times_are_those_of_the_settings(servers: str) -> None:
    records = await read_all(KafkaBus(KafkaSettings(bootstrap_servers=servers)), NAME, TRAJECTORIES)
    trajectories = [message for record in records if isinstance(message := record.message(), Trajectory)]
    assert len(trajectories) >= 4 * 8 * 4
    for one in trajectories:
        length = trace_length(LengthTraceSettings(), one.group_id, one.sample_index, None)
        assert len(one.token_ids) == min(length, 3000)
        assert one.finish_reason == ("stop" if length <= 3000 else "length")
        fastest_s = 0.01 * (1 + 1 / 64) * len(one.token_ids) / 50.0
        assert one.finished_at - one.started_at > 0.98 * fastest_s - 0.002
    assert any(len(one.version_spans) > 1 for one in trajectories)


async def test_held_out_prompts_are_evaluated_once_a_version_up_to_the_last_and_never_trained(
    emulated_run: EmulatedRun,
) -> None:
    bus = KafkaBus(KafkaSettings(bootstrap_servers=emulated_run.servers))
    reports = [r.message() for r in await read_all(bus, NAME, EVALUATIONS)]
    told = [(str(report.version), report.samples) for report in reports if isinstance(report, EvaluationReport)]
    assert told == sorted(set(told))
    assert {version for version, _ in told} <= {"1-0", "1-2", "1-4"}
    assert told[-1] == ("1-4", 12)  # the end waits for it
    lines = [json.loads(line) for line in (emulated_run.directory / "metrics.jsonl").read_text().splitlines()]
    assert [line["evaluated"] for line in lines if "evaluated" in line] == [version for version, _ in told]
    assert emulated_run.summary()["evaluation"]["last"] == {"step": 4, **_told_of(lines[-1])}
    assert "held out, steps" in emulated_run.text()
    trained = [r.message() for r in await read_all(bus, NAME, TRAJECTORIES)]
    assert not [one for one in trained if isinstance(one, Trajectory) and one.group_id.startswith("evaluation:")]
    sampled = [one for r in await read_all(bus, NAME, EVALUATION_SAMPLES) if isinstance(one := r.message(), Trajectory)]
    assert {one.prompt_id for one in sampled} == {f"evaluation:held_out/{index}" for index in range(6)}


def _told_of(line: dict[str, float]) -> dict[str, float]:
    return {name: round(value, 4) for name, value in line.items() if name.startswith("eval/")}


def too_long_prompts(directory: Path, name: str) -> Path:
    """A run on 40 prompts of its own, none of which fits into the context of 30 tokens."""
    rows = [{"prompt": "long " * 60 + str(index)} for index in range(40)]
    (directory / "own.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    config = directory / f"{name}.toml"
    text = CONFIG.format(directory=directory, name=name).replace("max_completion_length = 3000", "")
    text = text.replace("bucket_boundaries = [500, 1000]", "max_completion_length = 20\nbucket_boundaries = [10]")
    data = f'path = "{directory / "own.jsonl"}"'
    config.write_text(text.replace('dataset = "chain_sum"', data))
    return config


def test_a_run_whose_prompts_cannot_be_sampled_ends_with_one_line(tmp_path: Path, bootstrap_servers: str) -> None:
    name = "emulated-all-bad"
    options = (f"--kafka.bootstrap_servers={bootstrap_servers}", "--generation.max_model_len=30", "--run.workers=1")
    run = LocalRun.start(too_long_prompts(tmp_path, name), name, *options)
    try:
        assert run.wait() == 2, run.text()[-4000:]
    finally:
        run.end()
    last = run.text().strip().splitlines()[-1]
    assert last.startswith("error: ")
    assert "expected few refused prompts, got 51 in a row" in last
    assert "longer than 29 tokens: prompt own/" in last
    log = "".join(path.read_text() for path in (run.directory / "logs").glob("worker-*.log"))
    assert 0 < log.count("prompt refused") < 30
