"""The stages: one command, one module, ``command`` above ``run``. ``stages/README.md`` says what each reads."""
