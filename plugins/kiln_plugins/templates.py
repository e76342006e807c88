"""Chat templates by name, for models that bring none or to replace the one they bring."""

from __future__ import annotations

from collections.abc import Iterable

from kiln_cli import Template, hookimpl

CHATML = Template(
    name="chatml",
    doc="plain ChatML, one block a message; what a model without a template gets",
    source=(
        "{% for message in messages %}"
        "{{ '<|im_start|>' + message['role'] + '\\n' + message['content'] + '<|im_end|>\\n' }}"
        "{% endfor %}"
        "{% if add_generation_prompt %}{{ '<|im_start|>assistant\\n' }}{% endif %}"
    ),
)


@hookimpl
def kiln_templates() -> Iterable[Template]:
    return (CHATML,)
