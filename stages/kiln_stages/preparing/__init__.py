"""The parts of `kiln prepare`: rows screened in parallel, then decided on by their keys."""
