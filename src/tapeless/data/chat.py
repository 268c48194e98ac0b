"""Chat formats: a conversation as text, by a Jinja template as Hugging Face has them, and as tokens.

The default is ChatML, or lines of `role: content` for a tokenizer without its special tokens. An imported model has a template
of its own, which is untrusted: Jinja's sandbox renders it, in a process with limits of time and memory.

A message that contains the name of a special token must not become that token. So each such name is replaced by a character
that occurs nowhere else, the template is rendered, special tokens are found, and the names are put back as plain text.

What an assistant said is the difference between the conversation up to its message and the prompt for it, up to the special
token that ends it. A template whose beginning changes when more messages follow cannot be split like this, which is an error.
Tested by: tests/data/test_chat_format.py."""

import json
import re
import time
from collections.abc import Callable, Sequence
from functools import lru_cache, partial
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from tapeless.data.files import atomic_write
from tapeless.data.tokenizer import MESSAGE_END, MESSAGE_START, Tokenizer
from tapeless.data.worker import Limits, Worker
from tapeless.errors import DataError
from tapeless.regular import regular

CHATML = (
    "{% for message in messages %}"
    "{{ '<|im_start|>' + message['role'] + '\n' + message['content'] + '<|im_end|>\n' }}"
    "{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}"
)
PLAIN = (
    "{% for message in messages %}{{ message['role'] + ': ' + message['content'] + '\n' }}{% endfor %}"
    "{% if add_generation_prompt %}{{ 'assistant: ' }}{% endif %}"
)
ASSISTANT = "assistant"
FILE = "chat_template.jinja"  # in a run, in prepared data, and in a Hugging Face directory
MAX_TEMPLATE, MAX_TEXT = 1 << 18, 1 << 24  # characters of a template, and of a conversation
MAX_SECONDS = 2.0  # of rendering one; a usual template takes less than a millisecond


class Message(NamedTuple):
    role: str
    content: str


class Segment(NamedTuple):
    text: str
    counts: bool  # in the loss


class Turn(NamedTuple):
    """Tokens of a conversation."""

    ids: np.ndarray  # (n,) int64
    counts: bool  # in the loss


class ChatFormat:
    def __init__(
        self,
        tokenizer: Tokenizer,
        template: str | None = None,
        *,
        bos_id: int | None = None,
        eos_ids: Sequence[int] = (),
    ):
        """template: by default the one for this tokenizer. bos_id, eos_ids: those of the model, for templates that use them."""
        default = CHATML if {MESSAGE_START, MESSAGE_END} <= tokenizer.special.keys() else PLAIN
        self.tokenizer, self.template = tokenizer, default if template is None else template
        names = {i: name for name, i in tokenizer.special.items()}
        first_eos = next(iter(eos_ids), tokenizer.end_of_text)
        self._variables = {
            "bos_token": names.get(-1 if bos_id is None else bos_id, ""),
            "eos_token": names.get(-1 if first_eos is None else first_eos, ""),
        }
        self._special = re.compile("|".join(map(re.escape, sorted(names.values(), key=len, reverse=True))) or r"(?!)")
        self._renderer = renderer(self.template)
        end = [first_eos] if first_eos is not None else tokenizer.encode("\n").tolist()
        self.text_end = np.array(end, np.int64)  # (n,) after a text that is no conversation: the end of text, or of a line
        self.answer_end = self._answer_end()  # (n,)

    @property
    def eos_ids(self) -> tuple[int, ...]:
        """The special token that ends an answer, if there is one."""
        return tuple(i for i in self.answer_end.tolist() if i in self.tokenizer.special.values())

    def prompt(self, messages: Sequence[Message]) -> np.ndarray:  # (n,) int64
        """The conversation so far, and the beginning of the assistant's answer."""
        return np.concatenate([np.empty(0, np.int64), *(turn.ids for turn in self.turns(messages, answer=True))])

    def turns(self, messages: Sequence[Message], *, answer: bool = False) -> list[Turn]:
        """The tokens of a conversation; answer: with the beginning of the next answer. An answer that the template does not
        end with a special token is ended by answer_end."""
        shields = self._shields(messages)

        def shielded_text(text: str) -> str:
            return self._special.sub(lambda name: shields[name[0]], text)

        shielded = [{"role": shielded_text(m.role), "content": shielded_text(m.content)} for m in messages]
        names = {ord(shield): name for name, shield in shields.items()}
        turns: list[Turn] = []
        for text, counts in self._segments(shielded, answer):
            ids = self._encode(text.rstrip() if counts and not self._ended(text) else text, names, first=not turns)
            turns.append(Turn(np.append(ids, self.answer_end) if counts and not self._ended(text) else ids, counts))
        return turns

    def _shields(self, messages: Sequence[Message]) -> dict[str, str]:
        """For each name of a special token in the messages, a character that is in no message, name or template."""
        texts = {text for message in messages for text in message}
        found = {name for text in texts for name in self._special.findall(text)}
        if not found:
            return {}
        used = set().union(self.template, *texts, *self.tokenizer.special)
        unused = (c for c in map(chr, (*range(0xE000, 0xF900), *range(0xF0000, 0xFFFFE))) if c not in used)
        return dict(zip(sorted(found), unused, strict=False))

    def _segments(self, messages: list[dict[str, str]], answer: bool) -> list[Segment]:
        whole = self._render(messages, answer)
        segments, done = [], 0
        for i, message in enumerate(messages):
            if message["role"] != ASSISTANT:
                continue
            before, after = self._render(messages[:i], True), self._render(messages[: i + 1], False)
            if not (whole.startswith(after) and after.startswith(before) and len(before) >= done):
                raise DataError(
                    f"the chat template cannot be split into turns: it writes what comes before message {i + 1} in another way "
                    "if more messages follow; use conversations with one answer, or another template"
                )
            said = after[len(before) :]
            ends = [name.end() for name in self._special.finditer(said)]
            end = len(before) + ends[-1] if ends and not said[ends[-1] :].strip() else len(after)
            segments += [Segment(whole[done : len(before)], False), Segment(whole[len(before) : end], True)]
            done = end
        rest = whole[done:]
        return [*segments, Segment(rest, False)] if rest and (answer or not segments) else segments

    def _ended(self, text: str) -> bool:
        names = self._special.findall(text)
        return bool(names) and text.endswith(names[-1])

    def _answer_end(self) -> np.ndarray:  # (n,) int64
        """What ends an answer: the template's special token, or else what ends a text."""
        try:
            text = self._segments([{"role": "user", "content": "a"}, {"role": ASSISTANT, "content": "b"}], False)[-1].text
        except DataError:  # a conversation gives the same error; without one the model can be used
            return self.text_end
        names = self._special.findall(text)
        return np.array([self.tokenizer.special[names[-1]]]) if self._ended(text) else self.text_end

    def _encode(self, text: str, names: dict[int, str], *, first: bool) -> np.ndarray:  # (n,) int64
        """Text with special tokens; names: what shields stand for. The default format without any begins as the tokenizer
        begins a text."""
        parts, done = [np.empty(0, np.int64)], 0
        for name in self._special.finditer(text):
            parts += [self._plain(text[done : name.start()].translate(names)), np.array([self.tokenizer.special[name[0]]])]
            done = name.end()
        begins = first and self.template == PLAIN
        rest = text[done:].translate(names)
        return np.concatenate([*parts, self.tokenizer.encode_prompt(rest) if begins else self._plain(rest)])

    def _plain(self, text: str) -> np.ndarray:  # (n,) int64
        return self.tokenizer.encode(text) if text else np.empty(0, np.int64)

    def _render(self, messages: list[dict[str, str]], answer: bool) -> str:
        variables = {"messages": messages, "add_generation_prompt": answer, "tools": None, **self._variables}
        return self._renderer(variables)


def write_template(folder: Path, template: str) -> None:
    with atomic_write(folder / FILE) as file:
        file.write(template.encode())


def read_template(folder: Path) -> str | None:
    try:
        return regular(folder / FILE).read_text(encoding="utf-8")
    except FileNotFoundError:
        return None
    except (OSError, ValueError) as error:
        raise DataError(f"{folder / FILE}: cannot be read: {error}") from None


def compile_template(source: str) -> Any:  # jinja2.Template
    """In a sandbox, with what transformers offers to templates."""
    from jinja2 import nodes
    from jinja2.exceptions import TemplateError
    from jinja2.ext import Extension
    from jinja2.sandbox import ImmutableSandboxedEnvironment

    class Generation(Extension):
        """{% generation %}…{% endgeneration %} marks an answer for transformers; it changes no text."""

        tags = frozenset({"generation"})  # type: ignore[assignment]

        def parse(self, parser: Any) -> Any:
            line = next(parser.stream).lineno
            body = parser.parse_statements(("name:endgeneration",), drop_needle=True)
            return nodes.Scope(body).set_lineno(line)

    class Environment(ImmutableSandboxedEnvironment):
        intercepted_binops = frozenset(("*", "**", "%"))  # the ways to a huge value in one step

        def call_binop(self, context: Any, operator: str, left: Any, right: Any) -> Any:
            if operator == "**" or not all(isinstance(x, int | float) for x in (left, right)):
                raise TemplateError(f"a chat template may use {operator} with numbers only, and no powers")
            return super().call_binop(context, operator, left, right)

    def refuse(message: str) -> None:
        raise TemplateError(message)

    def to_json(
        value: Any, ensure_ascii: bool = False, indent: Any = None, separators: Any = None, sort_keys: bool = False
    ) -> str:
        """Without the options of json.dumps that call what they are given, which the sandbox would not see."""
        return json.dumps(value, ensure_ascii=ensure_ascii, indent=indent, separators=separators, sort_keys=sort_keys)

    if len(source) > MAX_TEMPLATE:
        raise DataError(f"the chat template has {len(source):,} characters; at most {MAX_TEMPLATE:,} are read")
    environment = Environment(trim_blocks=True, lstrip_blocks=True, extensions=[Generation, "jinja2.ext.loopcontrols"])
    environment.filters["tojson"] = to_json
    environment.globals["raise_exception"] = refuse
    environment.globals["strftime_now"] = time.strftime
    try:
        return environment.from_string(source)
    except (TemplateError, RecursionError) as error:
        raise DataError(f"the chat template is not valid Jinja: {str(error)[:200]!r}") from None


def answers(source: bytes) -> Callable[..., list[bytes]]:
    """Of a process that renders one template."""
    template = compile_template(source.decode())

    def answer(variables: bytes) -> list[bytes]:
        return [limited(template, json.loads(variables)).encode()]

    return answer


def limited(template: Any, variables: dict[str, Any]) -> str:  # jinja2.Template
    """The text that a template generates, unless it becomes too large."""
    pieces, size = [], 0
    try:
        for piece in template.generate(**variables):
            pieces.append(piece)
            size += len(piece)
            if size > MAX_TEXT:
                raise DataError(f"the chat template wrote more than {MAX_TEXT:,} characters for one conversation")
    except (DataError, MemoryError):
        raise
    except Exception as error:  # anything that an expression of a template can raise
        raise DataError(f"the chat template cannot render this conversation: {str(error)[:200]!r}") from None
    return "".join(pieces)


@lru_cache(maxsize=4)
def renderer(source: str) -> Callable[[dict[str, Any]], str]:
    """What renders a template. One of unknown origin is compiled and rendered in a process with limits: the sandbox keeps it
    from this machine's files, not from its time and memory."""
    if source in (CHATML, PLAIN):
        return partial(limited, compile_template(source))
    worker = Worker("tapeless.data.chat:answers", source.encode(), what="the chat template", limits=Limits(MAX_SECONDS))
    return lambda variables: worker.ask(json.dumps(variables).encode())[0].decode()
