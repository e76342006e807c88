"""The parts of `kiln admit`: where rows come from, the one contract they meet, what is written, and that it is true."""
