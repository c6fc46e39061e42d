"""Chat templates: real ones, what the sandbox refuses, and errors in words."""

import datetime

import pytest

from jaxflash.hf.chat import render
from jaxflash.tokenizer import ByteTokenizer

CHATML = (
    "{% for message in messages %}{% if loop.first and messages[0]['role'] != 'system' %}"
    "{{ '<|im_start|>system\\nYou help.<|im_end|>\\n' }}{% endif %}"
    "{{'<|im_start|>' + message['role'] + '\\n' + message['content'] + '<|im_end|>' + '\\n'}}{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|im_start|>assistant\\n' }}{% endif %}"
)
LLAMA3 = """{% set loop_messages = messages %}{% for message in loop_messages %}
{% set head = '<|start_header_id|>' + message['role'] + '<|end_header_id|>\\n\\n' %}
{% set content = head + message['content'] | trim + '<|eot_id|>' %}
{% if loop.index0 == 0 %}{% set content = bos_token + content %}{% endif %}{{ content }}{% endfor %}
{%- if add_generation_prompt %}{{ '<|start_header_id|>assistant<|end_header_id|>\\n\\n' }}{%- endif %}"""
MISTRAL = (
    "{{ bos_token }}{% for message in messages %}{% if (message['role'] == 'user') != (loop.index0 % 2 == 0) %}"
    "{{ raise_exception('Conversation roles must alternate user/assistant/user/assistant/...') }}{% endif %}"
    "{% if message['role'] == 'user' %}{{ '[INST] ' + message['content'] + ' [/INST]' }}"
    "{% else %}{{ message['content'] + eos_token }}{% endif %}{% endfor %}"
)
USER = [{"role": "user", "content": "Hi <b>&"}]


class Speaking(ByteTokenizer):
    special_tokens = {"bos_token": "<s>", "eos_token": "</s>"}

    def __init__(self, template):
        self.chat_template = template


@pytest.mark.parametrize(
    ("template", "messages", "expected"),
    [
        (CHATML, USER, "<|im_start|>system\nYou help.<|im_end|>\n<|im_start|>user\nHi <b>&<|im_end|>\n"
                       "<|im_start|>assistant\n"),
        (LLAMA3, [{"role": "user", "content": " Hi \n"}],
         "<s><|start_header_id|>user<|end_header_id|>\n\nHi<|eot_id|>"
         "<|start_header_id|>assistant<|end_header_id|>\n\n"),
        (MISTRAL, [*USER, {"role": "assistant", "content": "Yes"}, {"role": "user", "content": "2"}],
         "<s>[INST] Hi <b>& [/INST]Yes</s>[INST] 2 [/INST]"),
        ("{{ messages | tojson }}", USER, '[{"role": "user", "content": "Hi <b>&"}]'),
        ("{{ tools is none }}", USER, "True"),
        ("{% for m in messages %}{% break %}{% endfor %}a", USER, "a"),
        ("{% for m in messages %}{% generation %}{{ m.content }}{% endgeneration %}!{% endfor %}", USER, "Hi <b>&!"),
        ("  {% if true %}\n  x\n  {% endif %}\n", USER, "  x\n"),
    ],
)  # fmt: skip
def test_templates_as_transformers_renders_them(template, messages, expected):
    assert render(Speaking(template), messages) == expected


def test_the_opening_of_the_reply_is_optional():
    assert not render(Speaking(CHATML), USER, add_generation_prompt=False).endswith("assistant\n")
    assert render(Speaking("{{ tools[0].name }}"), USER, tools=[{"name": "f"}]) == "f"


def test_today_is_known():
    assert render(Speaking("{{ strftime_now('%Y') }}"), USER) in (
        str(datetime.datetime.now().year), str(datetime.datetime.now().year - 1),
    )  # fmt: skip


@pytest.mark.parametrize(
    ("template", "message"),
    [
        (MISTRAL, "Conversation roles must alternate"),
        ("{{ messages.__class__.__mro__ }}", "unsafe"),
        ("{{ ''.__class__.__base__.__subclasses__() }}", "unsafe"),
        ("{% set _ = messages.append(1) %}", "unsafe"),
        ("{% set _ = messages[0].update(role=1) %}", "unsafe"),
        ("{{ render.__globals__ }}", "undefined"),
        ("{% for", "template refuses"),
        ("{{ messages[0].nothing.more }}", "has no attribute 'nothing'"),
        ("{{ 1 / 0 }}", "ZeroDivisionError"),
        ("{{ cycler() }}", "RuntimeError"),
        ("{{ messages + 'x' }}", "TypeError"),
        ("{{ 'x' | center(9000000000000000000) }}", "MemoryError"),
        ("{{ range(10000000) | list }}", "OverflowError"),
        ("{% include '/etc/passwd' %}", "template fails|no loader"),
        ("{{ x | nofilter }}", "No filter named 'nofilter'"),
    ],
)
def test_what_a_template_may_not_do(template, message):
    messages = [{"role": "assistant", "content": "x"}]
    with pytest.raises(ValueError, match=message) as caught:
        render(Speaking(template), messages)
    assert str(caught.value).startswith("chat: ")


def test_messages_are_not_changed():
    messages = [{"role": "user", "content": "x"}]
    render(Speaking(CHATML), messages)
    assert messages == [{"role": "user", "content": "x"}]


@pytest.mark.parametrize("messages", [[], [{}], [{"role": 3}]])
def test_messages_that_are_none(messages):
    with pytest.raises(ValueError, match="must be a list of dicts"):
        render(Speaking(CHATML), messages)


def test_a_tokenizer_without_a_template():
    with pytest.raises(ValueError, match="has no chat_template"):
        render(ByteTokenizer(), USER)
