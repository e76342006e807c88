"""Claims about evidence, each of which holds, fails, or cannot be checked here."""
