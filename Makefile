# kiln's own chain. `make run` is the main job on real rows and a real small model, `make run-opd` distils what it
# trained into another adapter; `make test` runs the tests.

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

# Distillation: the teacher is the model with the adapter of $(RUN).
OPD := runs/opd
OPD_CONFIG := fixtures/opd.toml
OPD_CUT := runs/opd-resumed
OPD_KILL_AFTER := 25
TEACHER := smollm2+tool-calls
REGISTRY := $(OPD)/registry
SCORED := $(OPD)/scored.jsonl $(OPD)/heldout.jsonl

.DELETE_ON_ERROR:
.PHONY: run run-opd test test-faults test-trl check bench docs clean install fetch

run: $(RUN)/verified $(CUT)/verified
	$(KILN) report $(RUN) --against $(CUT)
	$(KILN) generate $(RUN) --row 3

include stages/stages.mk

$(eval $(call kiln_run,$(RUN),$(CONFIG),$(RAW),$(MODEL)))

# kiln_killed: run directory, config, step, what must be there before. A training that dies by SIGKILL behind that step
# and is resumed by a new process.
define kiln_killed
$(1)/.stamps/train: $(1)/admit_manifest.json $(2) | $(4)
	$$(BIN)/python fixtures/kill_training.py $(1) --after-step $(3) -- \
	    $$(KILN) train $(2) --out $(1) --fresh
	$$(KILN) resume $(1)
	@mkdir -p $$(@D) && touch $$@
$(1)/train_receipt.json: $(1)/.stamps/train
	@grep -qs '"status": "success"' $$@ || $$(KILN) resume $(1)
endef

# The same evidence again, and the same training, cut.
$(eval $(call kiln_data,$(CUT),$(CONFIG),$(RAW),$(MODEL)))
$(eval $(call kiln_killed,$(CUT),$(CONFIG),$(KILL_AFTER),$(RUN)/train_receipt.json))
$(eval $(call kiln_verify,$(CUT)))

# A teacher scores 40 real questions and 8 that are held out; a new adapter is distilled on the 40. The report has the
# reverse KL on the 8 before and after, and compares the adapter with that of a training that was killed and resumed.
run-opd: $(OPD)/verified $(OPD_CUT)/verified
	$(KILN) teacher verify $(TEACHER) --registry $(REGISTRY)
	$(KILN) report $(OPD) --against $(OPD_CUT)

$(REGISTRY)/teachers.json: $(RUN)/verified
	$(KILN) teacher register $(TEACHER) --model $(MODEL) --adapter $(RUN)/train/adapter --registry $(@D) --replace
	@touch $@

$(OPD)/rows/.written: $(RUN)/data_manifest.json fixtures/opd_rows.py
	$(BIN)/python fixtures/opd_rows.py $(RUN) --out $(@D) --train 40 --heldout 8
	@touch $@
$(OPD)/rows/train.jsonl $(OPD)/rows/heldout.jsonl: $(OPD)/rows/.written

$(SCORED): $(REGISTRY)/teachers.json
$(eval $(call kiln_score,$(OPD)/scored.jsonl,$(OPD)/rows/train.jsonl,$(TEACHER),$(OPD_CONFIG)))
$(eval $(call kiln_score,$(OPD)/heldout.jsonl,$(OPD)/rows/heldout.jsonl,$(TEACHER),$(OPD_CONFIG)))
$(eval $(call kiln_distil,$(OPD),$(OPD_CONFIG),$(SCORED),$(MODEL)))

$(eval $(call kiln_admit_scored,$(OPD_CUT),$(OPD_CONFIG),$(SCORED),$(MODEL)))
$(eval $(call kiln_killed,$(OPD_CUT),$(OPD_CONFIG),$(OPD_KILL_AFTER),$(OPD)/train_receipt.json))
$(eval $(call kiln_verify,$(OPD_CUT)))

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
	    fixtures/opd_rows.py \
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
