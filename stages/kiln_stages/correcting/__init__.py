"""The parts of ``kiln corrections``: one correction, the store they lie in, what is added, and what training marks."""
