"""The parts of `kiln inspect` and `kiln why`: naming a row, finding it in every stage, showing its tokens."""
