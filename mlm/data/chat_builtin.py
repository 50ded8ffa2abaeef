"""Chat templates for base models that have none, by name. Apart from Jinja, which no help or check takes."""

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
"""Name of the tokenizer's own template, each answer as it is rendered when nothing follows it: templates of
models that think leave out the thoughts of earlier turns."""
