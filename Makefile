# What make can do here: `make help`. Each target sets up what it needs in .venv by itself.
# PYTHON=... chooses the interpreter; the default is the first that is 3.11 or newer.

MODEL =
PROMPT =
DATA =
OUT =
ARGS =
TORCH ?= torch==2.13.0
VENV ?= .venv
# Text for the shell, not for make: a "$" in a prompt stays a "$".
override export MODEL := $(value MODEL)
override export PROMPT := $(value PROMPT)
override export DATA := $(value DATA)
override export OUT := $(value OUT)
export PYTHON TORCH

python := $(VENV)/bin/python
# Compiling takes most of the time; more processes than this take too much memory, and tests side
# by side share what they compile.
pytest := -m pytest -n auto --maxprocesses 4 --dist worksteal
shapes := tests/jaxllm/ops tests/jaxllm/test_layers.py tests/jaxllm/test_cache.py tests/jaxllm/test_sampling.py tests/jaxllm/test_generate.py tests/jaxllm/test_programs.py tests/jaxllm/test_run.py
shapes += --jaxtyping-packages=jaxllm,pallas_kernels,shape_check.check -m "not slow and not reference and not own_errors"

.PHONY: help generate finetune test test-reference test-shapes gpu-compile lint format clean
.DEFAULT_GOAL := help
.NOTPARALLEL:

help: ## say what each target does
	@sed -n 's/^\([a-z-]*\):[^#]*## /\1\t/p' Makefile | while IFS='	' read -r name text; do printf '  make %-15s %s\n' "$$name" "$$text"; done

generate: ## write text; PROMPT="..." MODEL=folder ARGS="--temperature 0.8"
	@.ci/environment
	@$(python) -m jaxllm generate $${MODEL:+"$$MODEL"} $${PROMPT:+--prompt="$$PROMPT"} $(ARGS)

finetune: ## train adapters; MODEL=folder DATA=file OUT=folder ARGS="--full"
	@.ci/environment train
	@$(python) -m jaxllm finetune "$${MODEL:-checkpoints/tiny-shakespeare}" --data="$${DATA:-examples/data/clerk.jsonl}" --out="$${OUT:-checkpoints/clerk}" $(ARGS)

test: ## run the tests; ARGS="-k rope" for some of them
	@.ci/environment test
	@$(python) $(pytest) $(ARGS)

test-reference: ## compare with torch and transformers, live; TORCH=... names another build
	@.ci/environment test reference
	@$(python) $(pytest) -m reference $(ARGS)

test-shapes: ## run the fast tests with the shapes in all signatures checked at run time
	@.ci/environment test
	@PYTHONPATH=tests $(python) $(pytest) $(shapes) $(ARGS)

gpu-compile: ## compile kernels and programs for an H200, without one; ARGS="rms_norm" for some
	@.ci/gpu-compile $(ARGS)

lint: ## check style and types
	@.ci/environment test dev
	$(python) -m ruff check
	$(python) -m ruff format --check
	$(python) -m pyright

format: ## format the code, and mend what ruff can mend
	@.ci/environment test dev
	$(python) -m ruff check --fix
	$(python) -m ruff format

clean: ## remove all that make and the tests have made
	rm -rf .venv .venv-* .cache build dist .pytest_cache .ruff_cache .hypothesis
	find . -name __pycache__ -type d -prune -exec rm -rf {} +
