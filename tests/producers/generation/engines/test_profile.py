"""What `streamrl profile` measures of vLLM, with the engine that tests share."""

from pathlib import Path

import pytest

from streamrl.planning.profiler import Effort, profile
from streamrl.planning.sharing import RunCosts
from streamrl.settings.loading import validated
from tests.producers.generation.engines.conftest import SLOTS, KeptDecoder

pytestmark = [pytest.mark.vllm, pytest.mark.processes]


def test_transfers_prefills_and_steps_of_vllm_are_measured(
    vllm_decoder: KeptDecoder, no_eos_dir: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("streamrl.planning.profiler.build_decoder", lambda *_arguments: vllm_decoder.of(no_eos_dir))
    monkeypatch.setattr("streamrl.planning.profiler.run_costs", lambda *_: RunCosts(0.0, 0.0))
    monkeypatch.setattr("streamrl.planning.measuring.SHARING_S", 0.3)
    settings = validated(
        {
            "model": {"path": str(no_eos_dir)},
            "data": {"dataset": "chain_sum"},
            "loop": {"max_prompt_length": 16, "max_completion_length": 32},
            "generation": {"engine": "vllm", "max_num_seqs": SLOTS},
            "batching": {"token_budget": 128},
            "training": {"threads": 1},
        }
    )
    found = profile(settings, Effort(4, 1, 2), lambda line: None).profile
    assert [batch for batch, _ in found.decode.table] == [1, 2, 4, SLOTS]
    assert 0 < found.decode.adopt_s < found.weight_transfer_s < 5
