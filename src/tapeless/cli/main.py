"""`tapeless`: runs a command and turns every error into one line and an exit status.
Tested by: tests/cli/test_main.py."""

import argparse
import logging
import os
import sys
import time
from contextlib import ExitStack
from importlib import import_module

import tapeless
from tapeless.cli.parser import Parser
from tapeless.errors import RanksError, TapelessError
from tapeless.output import command_output, complain, open_closed_streams
from tapeless.progress import busy, erase, shown
from tapeless.start import freeze_imports, num_ranks, own_rank, print_any_character, raise_gc_threshold, silence
from tapeless.text import printable
from tapeless.training.phases import Phases, process_age
from tapeless.training.signals import Interrupted, StopSignals, acknowledging

# In the order of --help. Each is the module of this name, with _ for -, except for those in MODULES.
COMMANDS = ["train", "presets", "estimate", "generate", "chat", "eval", "lm-eval", "report", "data", "tokenizer"]
COMMANDS += ["export", "merge", "import", "gradcheck", "bench"]
MODULES = {"eval": "evaluate", "import": "import_model"}
LATER = 3.0  # seconds
EXIT_STATUS = """exit status:
  0  done                                      3    verification failed
  1  failed while running                      4    diverged, stopped by a guard
  2  usage, configuration or input error       75   stopped early, resumable
                                               130  interrupted with nothing to save"""


def build_parser() -> Parser:
    words = "Pretrain transformer language models without an autograd tape. `tapeless COMMAND --help` has the details."
    parser = Parser(prog="tapeless", description=words, epilog=EXIT_STATUS)
    parser.formatter_class = argparse.RawDescriptionHelpFormatter
    parser.add_argument("--version", action="version", version=f"tapeless {tapeless.__version__}")
    parser.add_argument("--debug", action="store_true", help="show the traceback of an error")
    parser.add_argument("--verbose", action="store_true", help="log decisions, such as the choice of kernels")
    commands = parser.add_subparsers(dest="command", metavar="COMMAND", required=True)
    for name in COMMANDS:
        module = import_module(f"tapeless.cli.{MODULES.get(name, name.replace('-', '_'))}")
        command = commands.add_parser(name, help=module.HELP, description=module.__doc__)
        command.formatter_class = argparse.RawDescriptionHelpFormatter
        command.set_defaults(parser=command)
        module.add_arguments(command)
    return parser


def load_plugins(argv: list[str] | None) -> None:
    """Before the other arguments are parsed, since a plugin may register values for them (`--optimizer NAME`)."""
    parser = Parser(add_help=False)
    parser.add_argument("--plugin", action="append", default=[])
    for path in parser.parse_known_args(argv)[0].plugin:
        from tapeless.plugins import load_plugin  # loads torch

        load_plugin(path)


class StderrHandler(logging.StreamHandler):
    """Not behind what a command is waiting for, which may stand in the line."""

    def emit(self, record: logging.LogRecord) -> None:
        erase()
        super().emit(record)


class OneLine(logging.Formatter):
    def formatMessage(self, record: logging.LogRecord) -> str:
        return printable(record.getMessage())


def main(argv: list[str] | None = None) -> int:
    if argv is not None:
        return run(argv, 0.0)
    # A waiting OpenMP thread spins before it sleeps, and on a busy machine it slows the thread it waits for. With a shorter
    # spin (GNU's OpenMP reads it when torch is loaded) a step takes 35 ms instead of 36 on two free cores, 260 instead of 800
    # with one of them busy; without any spinning 64 and 95.
    if "OMP_WAIT_POLICY" not in os.environ:
        os.environ.setdefault("GOMP_SPINCOUNT", "10000")
    raise_gc_threshold()
    open_closed_streams()
    print_any_character()
    with acknowledging():
        return run(None, process_age())


def run(argv: list[str] | None, age: float) -> int:
    """argv: None for a process that runs only this command."""
    given = sys.argv[1:] if argv is None else argv
    args = argparse.Namespace(debug="--debug" in given, phases=Phases(age), given=given)
    try:
        with ExitStack() as stack:
            if argv is None:
                stack.enter_context(StopSignals(raises=True, says=None if own_rank() else "stopping"))
                stack.enter_context(command_output())
            return _run(argv, args, stack, age)
    except TapelessError as error:
        if args.debug:
            raise
        let_the_first_speak(error, args)
        if not (follows(args) and isinstance(error, RanksError)):
            complain(f"error[{error.code}]: {printable(str(error))}")
        return error.exit_status
    except (KeyboardInterrupt, Interrupted):
        if not follows(args):
            complain("interrupted")
        return getattr(args, "interrupted", 130)
    except BrokenPipeError:  # the reader of the output, such as `head`, has ended
        return getattr(args, "status", 0)  # the command's status so far
    except OSError as error:  # of the operating system, about a file
        if args.debug:
            raise
        where = f"{error.filename}: " if error.filename else ""
        complain(f"error[FAILED]: {printable(f'{where}{error.strerror or error}')}")
        return 1
    except Exception as error:
        if args.debug:
            raise
        let_the_first_speak(error, args)
        if str(error) == "can't start new thread":  # of Python's threading
            fix = "raise the limit of processes (`ulimit -u`), or lower OMP_NUM_THREADS"
            complain(f"error[FAILED]: no thread can be started; {fix}")
        else:
            text = printable(f"{type(error).__name__}: {error}")
            complain(f"error[INTERNAL]: {text}; run `tapeless --debug …` for the traceback")
        return 1
    finally:
        freeze_imports()


def follows(args: argparse.Namespace) -> bool:
    """Whether this is one of several ranks that train, and not the first one, which prints and writes. Any other command is
    alone, also where a cluster numbers its processes."""
    return own_rank() > 0 and "on_ranks" in args


def let_the_first_speak(error: Exception, args: argparse.Namespace) -> None:
    """Of several ranks, which often fail together: the first one says it, unless it only lost the one that failed. Whoever
    started the ranks ends the others meanwhile."""
    if num_ranks() > 1 and (follows(args) or isinstance(error, RanksError)):
        time.sleep(LATER)


def _run(argv: list[str] | None, args: argparse.Namespace, stack: ExitStack, age: float) -> int:
    load_plugins(argv)
    build_parser().parse_args(argv, args)
    if argv is None and follows(args):
        silence()
    handler = StderrHandler()
    handler.setFormatter(OneLine())
    level = logging.ERROR if follows(args) else logging.INFO if args.verbose else logging.WARNING
    logging.basicConfig(level=level, handlers=[handler])
    if argv is None and not follows(args):
        stack.enter_context(shown(silent=age))
    if "waiting" in args:
        stack.enter_context(busy(args.waiting))
    status: int = args.run(args)
    return status


if __name__ == "__main__":
    sys.exit(main())
