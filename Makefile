# kiln's own chain. `make run` is the main job on real rows and a real small model; `make test` runs the tests.

PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
KILN := $(BIN)/kiln
# TRL, which kiln is measured against and whose trainer takes kiln's corpus in tests/with_trl. Never in $(VENV).
BENCH_VENV := .bench-venv

CONFIG := fixtures/demo.toml
RAW := fixtures/downloaded/bfcl_xlam_rows.jsonl
MODEL := models/smollm2-135m-instruct
RUN := runs/demo
# A second run of the same config that is killed half-way and resumed.
CUT := runs/demo-resumed
KILL_AFTER := 40

.DELETE_ON_ERROR:
.PHONY: run test test-faults test-trl check bench docs clean install fetch

run: $(RUN)/verified $(CUT)/verified
	$(KILN) report $(RUN) --against $(CUT)
	$(KILN) generate $(RUN) --row 3

include stages/stages.mk

$(eval $(call kiln_run,$(RUN),$(CONFIG),$(RAW),$(MODEL)))

# The same evidence again, then a training that dies by SIGKILL behind step $(KILL_AFTER) and is resumed by a new process.
$(eval $(call kiln_data,$(CUT),$(CONFIG),$(RAW),$(MODEL)))
$(CUT)/.stamps/train: $(CUT)/admit_manifest.json $(CONFIG) | $(RUN)/train_receipt.json
	$(BIN)/python fixtures/kill_training.py $(CUT) --after-step $(KILL_AFTER) -- \
	    $(KILN) train $(CONFIG) --out $(CUT) --fresh
	$(KILN) resume $(CUT)
	@mkdir -p $(@D) && touch $@
$(CUT)/train_receipt.json: $(CUT)/.stamps/train
	@grep -qs '"status": "success"' $@ || $(KILN) resume $(CUT)
$(eval $(call kiln_verify,$(CUT)))

install: $(VENV)/.installed
fetch: $(RAW) $(MODEL)/tokenizer.json

$(VENV)/.installed: pyproject.toml constraints.txt
	$(PYTHON) -m venv $(VENV)
	$(BIN)/pip install --quiet --constraint constraints.txt --editable '.[train,demo,dev]'
	@touch $@

$(RAW): | $(VENV)/.installed
	$(BIN)/python fixtures/fetch_rows.py --out $@

$(MODEL)/tokenizer.json: | $(VENV)/.installed
	$(BIN)/python fixtures/fetch_model.py --out $(MODEL)

test: $(VENV)/.installed fetch
	$(BIN)/python -m pytest

# Half an hour: every cut in a fresh process, kill -9 at random moments, random byte flips. -s shows the counts.
test-faults: $(VENV)/.installed
	$(BIN)/python -m pytest -m faults -s

check: $(VENV)/.installed
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy
	$(BIN)/mypy fixtures/_download.py fixtures/fetch_model.py fixtures/fetch_rows.py fixtures/kill_training.py \
	    bench/run.py bench/plain_prepare.py bench/bare_encode.py bench/trl_preparation.py bench/training_kiln.py \
	    bench/training_trl.py bench/long_vocabulary.py bench/distil_step.py docs/generate.py

$(BENCH_VENV)/.installed: pyproject.toml constraints.txt bench/requirements.txt
	$(PYTHON) -m venv $(BENCH_VENV)
	$(BENCH_VENV)/bin/pip install --quiet --constraint constraints.txt --requirement bench/requirements.txt \
	    --editable '.[train]' pytest
	@touch $@

# The tests that need TRL; `make test` skips them.
test-trl: $(BENCH_VENV)/.installed
	$(BENCH_VENV)/bin/python -m pytest tests/with_trl

bench: $(VENV)/.installed $(BENCH_VENV)/.installed fetch test-trl
	$(BIN)/python bench/run.py --trl-python $(BENCH_VENV)/bin/python

docs: $(VENV)/.installed
	$(BIN)/python docs/generate.py

clean:
	rm -rf runs .mypy_cache .ruff_cache .pytest_cache
