"""From messages to token ids with labels: rendering, the spans to train on and their proof, tokens and theirs."""
