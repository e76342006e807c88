"""kiln's own plugins: they use the same hooks as anyone's and import nothing but ``kiln_cli``."""
