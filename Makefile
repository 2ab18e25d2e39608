# make demo    sets up an environment and runs the demo
# make test    sets up an environment and runs the tests
# PYTHON=python3.12 picks another interpreter, VENV=dir another place for the environment.

PYTHON ?= $(shell command -v python3.11 || command -v python3)
VENV ?= .venv
RUN = $(VENV)/bin/python
# without bytecode: it would take half of the time, and Python writes what it imports by itself
PIP = $(RUN) -m pip --disable-pip-version-check install --quiet --no-compile
# torch (extra parity) is only for comparisons with transformers, pinned to a build for Python 3.11
EXTRAS ?= $(shell $(PYTHON) -c 'import sys; print("test", \
	*["parity", "eval"] * (sys.version_info[:2] == (3, 11)), sep=",")')

# where `make bench` writes; benchmarks/results has pages of files with a clean commit alone
RESULTS ?= benchmarks/results

# what `make hosts` installs without its dependencies: it is on no package index, and asks for an
# older JAX
BONSAI ?= jax-bonsai @ git+https://github.com/jax-ml/bonsai@36284254cf738d99c1c5d1e3a292d27656a0a365

# what an installation is made of: pyproject.toml, and the C++ that it compiles
BUILD = pyproject.toml setup.py $(wildcard cpu_kernels/csrc/*)

.PHONY: demo test lab hosts lowest aot lint audit bench docs wheel clean

demo: $(VENV)/.kvq
	$(VENV)/bin/kvq demo

test: $(VENV)/.kvq-test
	$(RUN) -m pytest -n 2 --dist worksteal $(ARGS)

# the laboratory's own tests, which neither `make test` nor CI runs
lab: $(VENV)/.kvq-test
	$(RUN) -m pytest -n 2 --dist worksteal laboratory/tests $(ARGS)

# the adapters of kvq_hosts beside the projects themselves, in an environment of their own
hosts:
	$(MAKE) --no-print-directory VENV=$(VENV)-hosts $(VENV)-hosts/.kvq-hosts
	$(VENV)-hosts/bin/python -m pytest tests/kvq_hosts $(ARGS)

# the oldest versions that pyproject.toml allows, in an environment of their own; their warnings are
# not ours
lowest:
	$(MAKE) --no-print-directory VENV=$(VENV)-lowest $(VENV)-lowest/.kvq-lowest
	$(VENV)-lowest/bin/python -m pytest -n 2 --dist worksteal -o addopts=--import-mode=importlib \
		-m "not aot and not gpu" -W default tests/kvq_models tests/kvq_hosts tests/kvq_tools $(ARGS)

# the GPU kernels, compiled for GPUs that are not there
aot: $(VENV)/.kvq-aot
	JAX_PLATFORMS=cpu $(RUN) -m pytest -n 2 --dist worksteal -m aot tests/aot $(ARGS)

lint: $(VENV)/.kvq-test
	$(VENV)/bin/ruff check .
	$(VENV)/bin/ruff format --check .
	$(VENV)/bin/pyright --pythonpath $(RUN)
	$(VENV)/bin/clang-format --dry-run --Werror cpu_kernels/csrc/* \
		tests/cpu_kernels/*.cc tests/cpu_kernels/*.h

# known faults of the installed packages, if a source of advisories can be reached
audit: $(VENV)/.kvq-test
	@-$(PIP) "pip-audit>=2.7"
	@$(RUN) -m tools.audit

bench: $(VENV)/.kvq-test
	$(RUN) -m benchmarks.cpu.attention --json $(RESULTS)/attention_cpu.json
	$(RUN) -m benchmarks.cpu.decode_step --model smollm2 --tokens 1024 4096 16384 --batch 1 \
		--rounds 32 --cache dense kivi:bits=4 kivi:bits=2 innerq:bits=2 \
		--json $(RESULTS)/decode_step_smollm2_cpu.json
	$(RUN) -m benchmarks.results_page

# the documentation site, in site/: pages, and a reference made of docstrings; kvq itself is not
# installed for it
docs: $(VENV)/.kvq-docs
	$(RUN) -m tools.documentation build/docs
	$(RUN) -m mkdocs build --strict

# what a release publishes for this platform and Python; an error if the CPU kernels were not
# compiled into it
wheel:
	$(PYTHON) -m pip --disable-pip-version-check wheel --quiet --no-deps --wheel-dir dist .
	@for wheel in dist/kvq_jax-*.whl; do \
		$(PYTHON) -m zipfile -l $$wheel | grep -q 'native.*[.]so' \
			|| { echo "$$wheel has no CPU kernels: a C++ compiler is needed, see above"; \
				exit 1; }; \
	done

clean:
	rm -rf $(VENV) $(VENV)-hosts $(VENV)-lowest build dist site *.egg-info

$(VENV)/bin/python:
	$(PYTHON) -m venv $(VENV)

$(VENV)/.kvq: $(VENV)/bin/python $(BUILD)
	@echo "installing kvq into $(VENV) (a minute or two) ..."
	$(PIP) -e ".[tools,serve]"
	@touch $@

$(VENV)/.kvq-test: $(VENV)/bin/python $(BUILD)
	@echo "installing kvq with extras $(EXTRAS) into $(VENV) (a few minutes) ..."
	$(PIP) -e ".[$(EXTRAS)]"
	@touch $@

# kvq itself is not installed for it: tests read the sources, and the kernels that lie beside them
$(VENV)/.kvq-hosts: $(VENV)/bin/python $(BUILD)
	@$(RUN) -m tools.requirements hosts >$@.txt
	@echo "installing other projects into $(VENV) (a few minutes) ..."
	$(PIP) -r $@.txt
	@$(PIP) --no-deps "$(BONSAI)" 2>/dev/null || \
		echo "bonsai could not be installed from $(BONSAI): its tests are skipped"
	-@ls cpu_kernels/native.*.so >/dev/null 2>&1 || $(RUN) setup.py --quiet build_ext --inplace
	@touch $@

$(VENV)/.kvq-lowest: $(VENV)/bin/python $(BUILD)
	@$(RUN) -m tools.requirements lowest >$@.txt
	@echo "installing the oldest versions into $(VENV) (a few minutes) ..."
	$(PIP) -r $@.txt
	-@ls cpu_kernels/native.*.so >/dev/null 2>&1 || $(RUN) setup.py --quiet build_ext --inplace
	@touch $@

$(VENV)/.kvq-docs: $(VENV)/bin/python pyproject.toml
	@$(RUN) -m tools.requirements docs >$@.txt
	$(PIP) -r $@.txt
	@touch $@

$(VENV)/.kvq-aot: $(VENV)/bin/python $(BUILD)
	@echo "installing kvq with extras test, aot into $(VENV) (a few minutes) ..."
	$(PIP) -e ".[test,aot]"
	@touch $@
