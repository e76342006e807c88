# Make rules for kiln runs, one a stage, each behind the manifest before it. Include this file from any project:
#
#   include path/to/stages.mk
#   $(eval $(call kiln_run,runs/mine,mine.toml,rows.jsonl,path/to/model))
#   all: runs/mine/verified
#
# A stage that is run again and changes nothing leaves its manifest as it is, so nothing behind it runs. The stamp is
# what tells Make that the stage has looked at its inputs; the manifest is what later stages depend on. A training that
# fails leaves a receipt too, which says so: it gets no stamp, and it is not taken for a training that is done.

KILN ?= kiln

# kiln_data: run directory, config, raw rows, model directory
define kiln_data
$(1)/.stamps/prepare: $(2) $(3)
	$$(KILN) prepare $(2) --out $(1)
	@mkdir -p $$(@D) && touch $$@
$(1)/data_manifest.json: $(1)/.stamps/prepare
	@test -e $$@ || $$(KILN) prepare $(2) --out $(1)

$(1)/.stamps/admit: $(1)/data_manifest.json $(2) $(4)/tokenizer.json
	$$(KILN) admit $(2) --out $(1)
	@mkdir -p $$(@D) && touch $$@
$(1)/admit_manifest.json: $(1)/.stamps/admit
	@test -e $$@ || $$(KILN) admit $(2) --out $(1)
endef

# kiln_verify: run directory. The check stands for the receipt; it needs neither torch nor a GPU.
define kiln_verify
$(1)/verified: $(1)/train_receipt.json
	$$(KILN) verify-receipt $(1)
	@touch $$@
endef

# kiln_train: run directory, config
define kiln_train
$(1)/.stamps/train: $(1)/admit_manifest.json $(2)
	$$(KILN) train $(2) --out $(1) --fresh
	@mkdir -p $$(@D) && touch $$@
$(1)/train_receipt.json: $(1)/.stamps/train
	@grep -qs '"status": "success"' $$@ || $$(KILN) train $(2) --out $(1) --fresh

$(call kiln_verify,$(1))
endef

# kiln_run: run directory, config, raw rows, model directory
define kiln_run
$(call kiln_data,$(1),$(2),$(3),$(4))

$(call kiln_train,$(1),$(2))
endef

# kiln_score: scored corpus to write, rows to score, teacher's alias, config that they are admitted by. The config names
# the registry. What a cut run has scored is in CORPUS.partial, and the next one goes on from there.
define kiln_score
$(1): $(2) $(4)
	@rm -f $$@
	$$(KILN) teacher score $(2) --teacher $(3) --config $(4) --out $$@
endef

# kiln_admit_scored: run directory, config, scored corpora that it names, model directory
define kiln_admit_scored
$(1)/.stamps/admit: $(2) $(3) $(4)/tokenizer.json
	$$(KILN) admit $(2) --out $(1)
	@mkdir -p $$(@D) && touch $$@
$(1)/admit_manifest.json: $(1)/.stamps/admit
	@test -e $$@ || $$(KILN) admit $(2) --out $(1)
endef

# kiln_distil: the same arguments
define kiln_distil
$(call kiln_admit_scored,$(1),$(2),$(3),$(4))

$(call kiln_train,$(1),$(2))
endef
