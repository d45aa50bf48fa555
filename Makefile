# Each target does all the set-up it needs on a fresh machine. CONTRIBUTING.md explains them.
.PHONY: help setup demo test soak

help:
	@echo "make setup  system packages, .venv, torch, build (quick when nothing changed)"
	@echo "make demo   the training run to watch: 4 learners, one of them killed"
	@echo "make test   C++ and Python tests"
	@echo "make soak   long proofs; writes a report under docs/soak/"

setup:
	@tools/setup.sh

demo: setup
	@.venv/bin/diloco demo $(ARGS)

test:
	@tools/run_tests.sh $(ARGS)

soak: setup
	@.venv/bin/python tools/soak.py $(ARGS)
