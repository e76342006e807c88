"""The parts of `kiln admit`: conversations rendered, labelled with proof, and tokenized."""
