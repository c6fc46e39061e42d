"""A conversation as one prompt, by the Jinja template that a tokenizer brings; and the model's reply to it.

Templates are downloaded text: they run in jinja2's immutable sandbox, with the extras that transformers gives them
(huggingface.co/docs/transformers, "Chat templates"): `raise_exception`, `strftime_now`, `tojson` that does not escape
HTML, loop controls, and the `generation` block, which here only marks its content.
"""

import datetime
import json
from collections.abc import Mapping, Sequence
from typing import Any, NoReturn

import jinja2
from jinja2.ext import Extension
from jinja2.sandbox import ImmutableSandboxedEnvironment

from jaxflash.config import Sampling
from jaxflash.generate import generate_tokens
from jaxflash.language_model import LanguageModel
from jaxflash.tokenizer import Tokenizer

Message = Mapping[str, Any]


def chat(model: LanguageModel, messages: str | Sequence[Message], sampling: Sampling | None = None) -> str:
    """The model's reply to a conversation.

    messages: dicts with "role" ("system", "user", "assistant") and "content", oldest first; a text is one of the user.
    The reply ends at one of `sampling.stop_tokens` (default: all that the checkpoint names), which is left out.

    Raises:
      ValueError: the tokenizer has no chat template, the template refuses the conversation, or it is too long.

    >>> chat(model, "What is the capital of France?")  # doctest: +SKIP
    'The capital of France is Paris.'
    """
    sampling = Sampling() if sampling is None else sampling
    conversation = [{"role": "user", "content": messages}] if isinstance(messages, str) else list(messages)
    tokenizer = model.tokenizer
    prompt = tokenizer.encode(render(tokenizer, conversation)).tolist()
    stops = sampling.stop_tokens or tokenizer.stop_ids
    rows = generate_tokens(
        model.config, model.params, [prompt], sampling, stops=stops, vocab_limit=tokenizer.vocab_size
    )
    return tokenizer.decode(rows[0])


def render(
    tokenizer: Tokenizer,
    messages: Sequence[Message],
    *,
    tools: Sequence[Mapping[str, Any]] | None = None,
    add_generation_prompt: bool = True,
) -> str:
    """The text that the model reads: the conversation, special tokens written out, and the opening of its own turn.

    Raises:
      ValueError: no template, one that is not Jinja, or one that refuses the messages (its own words are given).
    """
    if tokenizer.chat_template is None:
        raise ValueError(
            "chat: the tokenizer has no chat_template - the model was not trained on conversations, or the checkpoint "
            "lost its tokenizer_config.json. Use `generate` with a plain prompt."
        )
    if not messages or not all(isinstance(m, Mapping) and isinstance(m.get("role"), str) for m in messages):
        raise ValueError(f"chat: {messages=} - must be a list of dicts, each with a role and content.")
    try:
        template = _environment().from_string(tokenizer.chat_template)
        return template.render(
            messages=[dict(message) for message in messages],
            tools=None if tools is None else [dict(tool) for tool in tools],
            add_generation_prompt=add_generation_prompt,
            **tokenizer.special_tokens,
        )
    except jinja2.TemplateError as error:
        raise ValueError(f"chat: the template refuses: {error}. Change the messages, or the chat_template.") from error
    except (TypeError, ValueError, ArithmeticError, LookupError, AttributeError, RuntimeError, MemoryError) as error:
        raise ValueError(
            f"chat: the template fails on these messages ({type(error).__name__}: {error}) - it expects others. "
            "Change the messages, or the chat_template."
        ) from error


class _Generation(Extension):
    """`{% generation %}` ... `{% endgeneration %}` marks what the assistant said, for training; the text stays."""

    tags = {"generation"}

    def parse(self, parser: Any) -> Any:
        next(parser.stream)
        return parser.parse_statements(("name:endgeneration",), drop_needle=True)


def _environment() -> ImmutableSandboxedEnvironment:
    environment = ImmutableSandboxedEnvironment(
        trim_blocks=True, lstrip_blocks=True, extensions=[_Generation, "jinja2.ext.loopcontrols"]
    )
    environment.filters["tojson"] = _to_json
    environment.globals["raise_exception"] = _raise
    environment.globals["strftime_now"] = _now
    return environment


def _to_json(value: Any, ensure_ascii: bool = False, indent: int | None = None, **options: Any) -> str:
    return json.dumps(value, ensure_ascii=ensure_ascii, indent=indent, **options)


def _raise(message: str) -> NoReturn:
    raise jinja2.TemplateError(message)


def _now(pattern: str) -> str:
    return datetime.datetime.now().strftime(pattern)
