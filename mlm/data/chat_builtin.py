"""Built-in chat templates for base models, by name. This file imports no Jinja, for help and checks."""

IM_START, IM_END = "<|im_start|>", "<|im_end|>"
"""ChatML's marks of a turn."""
CHATML = """\
{%- for message in messages %}
{{- '<|im_start|>' + message.role + '\\n' }}
{%- if message.role == 'assistant' %}{% generation %}{{ message.content + '<|im_end|>' }}{% endgeneration %}
{%- else %}{{ message.content + '<|im_end|>' }}{% endif %}
{{- '\\n' }}
{%- endfor %}
{%- if add_generation_prompt %}{{ '<|im_start|>assistant\\n' }}{% endif %}
"""
BUILT_IN = {"chatml": CHATML}
TURNS = "turns"
"""Name of the tokenizer's template with each answer rendered as the last message: templates of reasoning
models drop the reasoning of earlier turns."""
