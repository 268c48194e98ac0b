"""Talk to a model that was trained on conversations.

    tapeless chat runs/tuned
    tapeless chat runs/tuned --system "Be brief." --temperature 0.7
    tapeless chat runs/tuned --once "What is 2 + 2?"
    tapeless chat runs/tuned < questions.txt

Each line is a message; from a file or pipe too, where only the answers are printed, one after the other. /clear begins a new
conversation, /exit or the end of the input ends the program. Ctrl-C ends the answer or drops the line, a second one ends the
program."""

import argparse
import signal
import sys
from collections.abc import Iterator
from contextlib import suppress
from typing import TYPE_CHECKING
from unicodedata import category

from tapeless.cli.generation import Loaded, add_generation_arguments, load_generator, print_stream
from tapeless.cli.options import say, warn
from tapeless.config import require
from tapeless.errors import InputError
from tapeless.training.signals import StopSignals

if TYPE_CHECKING:
    from tapeless.data.chat import ChatFormat

HELP = "talk to a model that was trained on conversations"
DIRECTIONS = "\u202a\u202b\u202c\u202d\u202e\u2066\u2067\u2068\u2069"
CLEAR, EXIT = "/clear", "/exit"
CONTEXT = 4096  # some models allow a million, and the keys and values of all of them are allocated


def add_arguments(parser: argparse.ArgumentParser) -> None:
    add_generation_arguments(parser)
    parser.add_argument("--once", metavar="TEXT", help="answer this message and exit")
    parser.add_argument("--system", metavar="TEXT", help="a system message before the conversation")
    parser.add_argument("--max-tokens", type=int, default=400, metavar="N", help="tokens of an answer at most (default 400)")
    words = f"tokens that the model sees (default its max_seq_len, or {CONTEXT:,} if that is more)"
    parser.add_argument("--context", type=int, metavar="N", help=words)
    parser.set_defaults(run=run)


def run(args: argparse.Namespace) -> int:
    require(args.max_tokens >= 1, "max_tokens", "at least 1", args.max_tokens)
    loaded = load_generator(args)
    from tapeless.data.chat import read_template
    from tapeless.training.imported import chat_of
    from tapeless.training.run_dir import RunDir

    run = RunDir(args.run_dir)
    limit = getattr(loaded.model.config, "max_seq_len", CONTEXT)
    context = min(limit, CONTEXT) if args.context is None else args.context
    require(1 <= context <= limit, "context", f"between 1 and max_seq_len = {limit}", context)
    if read_template(run.path) is None:
        warn(f"{run.path} was not trained on conversations; its answers will be continuations of the text")
    conversation = Conversation(loaded, chat_of(run, loaded.data.tokenizer), context, args)
    for line in [args.once] if args.once is not None else lines():
        if line == EXIT:
            break
        if line == CLEAR:
            conversation.clear()
        elif line.strip():
            try:
                conversation.answer(line)
            except InputError as error:
                if args.once is not None or not sys.stdin.isatty():
                    raise
                warn(str(error))
    return 0


def lines() -> Iterator[str]:
    if not sys.stdin.isatty():
        yield from (line.rstrip("\n") for line in sys.stdin)
        return
    with suppress(ImportError):
        import readline  # noqa: F401  input() then has a history and can be edited
    say(f"Ctrl-C ends an answer, {CLEAR} begins a new conversation, {EXIT} ends the program.")
    signal.signal(signal.SIGINT, signal.default_int_handler)  # at the prompt it ends a line, not the command
    interrupted = False  # by Ctrl-C at the prompt before
    while True:
        try:
            line = input("> ")
        except EOFError:
            print()
            return
        except KeyboardInterrupt:
            print()
            if interrupted:
                return
            interrupted = True
            say(f"(another Ctrl-C, Ctrl-D or {EXIT} ends the program)")
        else:
            interrupted = False
            yield line


class Conversation:
    def __init__(self, loaded: Loaded, chat: "ChatFormat", context: int, args: argparse.Namespace):
        from tapeless.generate.engine import Engine

        self.chat, self.context, self.eos_ids, self.sampling = chat, context, loaded.eos_ids, loaded.sampling
        self.max_tokens, self.system = args.max_tokens, args.system
        # Without a special token the end of an answer is a text.
        self.stop = [*args.stop, *([] if chat.eos_ids else [chat.tokenizer.decode(chat.answer_end)])]
        self.engine = Engine(loaded.model, capacity=context, vocab_size=chat.tokenizer.vocab_size)
        self.clear()

    def clear(self) -> None:
        from tapeless.data.chat import Message

        self.messages: list[Message] = [] if self.system is None else [Message("system", self.system)]
        self.first = len(self.messages)  # the system message is never left out

    def answer(self, text: str) -> None:
        """Print the answer to a message, while it is generated."""
        from tapeless.data.chat import ASSISTANT, Message
        from tapeless.generate.text import TextStream

        self.messages.append(Message("user", text))
        try:
            prompt = self._prompt()
        except InputError:
            self.messages.pop()
            raise
        room = min(self.max_tokens, self.context - len(prompt))
        stream = self.engine.submit(prompt, max_tokens=room, sampling=self.sampling, stop=self.eos_ids)
        pieces: list[str] = []

        def visible() -> Iterator[str]:
            for piece in answer:
                pieces.append(piece)
                yield shown(piece)

        with StopSignals((signal.SIGINT,), says=None) as interrupt:
            answer = TextStream(stream, self.chat.tokenizer, (), self.stop, cancelled=interrupt.requested)
            print_stream(visible())
        self.messages.append(Message(ASSISTANT, "".join(pieces)))
        if answer.finish_reason == "length":
            say(f"(the answer is cut off after {room} tokens)")

    def _prompt(self) -> list[int]:
        """The conversation as tokens. If less than a quarter of the context would be left for the answer, the oldest messages
        are left out."""
        messages = self.messages.copy()
        prompt = self.chat.prompt(messages)
        while len(prompt) > self.context * 3 // 4:
            if len(messages) <= self.first + 1:
                raise InputError(f"the message has {len(prompt)} tokens, and the context is {self.context}; shorten it")
            following = range(self.first + 1, len(messages))
            del messages[self.first : next(i for i in following if messages[i].role == "user")]
            prompt = self.chat.prompt(messages)
        if len(messages) < len(self.messages):
            self.messages = messages
            say(f"(the conversation is longer than the context of {self.context} tokens: its beginning is left out)")
        return [int(i) for i in prompt]


def shown(text: str) -> str:
    """Without the characters that control a terminal, or turn the direction of a text."""
    return "".join(c for c in text if c in "\n\t" or (category(c) not in ("Cc", "Cs") and c not in DIRECTIONS))
