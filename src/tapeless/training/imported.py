"""An imported model as a run: its weights are the checkpoint of step 0; it has a tokenizer, but no training data.

    config.toml  env.json  tokenizer.json  generation_config.json  [chat_template.jinja]  checkpoints/step-00000000/
`tapeless generate`, `eval --dataset-path`, `export` and `train new --init-from` accept it like any other run.
Tested by: tests/train/test_imported.py."""

import shutil
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import NamedTuple

from torch import Tensor

from tapeless.config import TRAINED_TOKENIZERS, ModelConfig, TrainConfig
from tapeless.data.chat import FILE as CHAT_TEMPLATE
from tapeless.data.chat import ChatFormat, read_template, write_template
from tapeless.data.files import file_sha256, write_json
from tapeless.data.tokenizer import Tokenizer, load_tokenizer, make_tokenizer
from tapeless.errors import ConfigError, InputError
from tapeless.interop.generation import FILE, Generation, read_generation
from tapeless.interop.hf_import import ExternalModel, read_model
from tapeless.plugins import required_plugins
from tapeless.regular import read_json
from tapeless.training.checkpoint import STATE_FIELDS, save_checkpoint
from tapeless.training.run_config import RunConfig, read_run_config, write_run_config
from tapeless.training.run_dir import RunDir, environment
from tapeless.training.seal import config_seal

FACTS = {"generation_sha256": FILE, "chat_template_sha256": CHAT_TEMPLATE}
LONGEST_WINDOW = 1024  # default seq_len of an evaluation: some models allow a million


class Imported(NamedTuple):
    run: RunDir
    model: ExternalModel
    tokenizer: Tokenizer


def import_model(source: Path, out_dir: Path, argv: Sequence[str], *, tokenizer: str | None = None) -> Imported:
    """tokenizer: `bytes` or the path of a tokenizer.json, for a directory without one."""
    model = read_model(source)
    chosen = choose_tokenizer(model, source, tokenizer)
    run = write_run(out_dir, model.config, model.params, chosen, model.generation, model.chat_template, argv)
    return Imported(run, model, chosen)


def write_run(
    out_dir: Path,
    config: ModelConfig,
    params: Mapping[str, Tensor],
    tokenizer: Tokenizer,
    generation: Generation,
    chat_template: str | None,
    argv: Sequence[str],
) -> RunDir:
    """Write a model as a run that has taken no step."""
    run = RunDir.create(out_dir)
    try:
        tokenizer.save(run.tokenizer)
        write_json(run.path / FILE, generation.settings())
        if chat_template is not None:
            write_template(run.path, chat_template)
        write_json(run.env, environment(argv))
        train = TrainConfig(tokenizer=str(run.tokenizer), seq_len=min(config.max_seq_len, LONGEST_WINDOW))
        facts = {"tokenizer_hash": tokenizer.fingerprint} | file_facts(run.path)
        imported = RunConfig(config, train, facts, required_plugins(config, train))
        counts = dict.fromkeys(("step", "tokens", "epoch", "sample_index"), 0)
        state = dict.fromkeys(STATE_FIELDS) | counts | {"seed": train.seed, "guard": {}, "world_size": 1}
        state["seal"] = config_seal(imported)
        save_checkpoint(run.checkpoints, params, {}, state)
        write_run_config(run.config, imported)
        run.complete()
    except BaseException:  # also Ctrl-C: an incomplete directory would block the next attempt
        shutil.rmtree(run.path, ignore_errors=True)
        raise
    return run


def file_facts(run: Path) -> dict[str, str]:
    """The hashes of the files in a run that its texts depend on, for [data] of config.toml."""
    return {name: file_sha256(run / file) for name, file in FACTS.items() if (run / file).is_file()}


def generation_of(run: RunDir, tokenizer: Tokenizer | None = None) -> Generation:
    """The generation settings of a run. Texts end with the end of text and, for a model of conversations, first of all with the
    end of an answer. tokenizer: the run's, if it is loaded already."""
    tokenizer = tokenizer or load_tokenizer(run.tokenizer)
    found = _stored_generation(run, tokenizer)
    if read_template(run.path) is not None:
        ids = dict.fromkeys((*chat_of(run, tokenizer).eos_ids, *found.eos_ids))
        found = found._replace(eos_ids=tuple(ids))
    return found


def chat_of(run: RunDir, tokenizer: Tokenizer) -> ChatFormat:
    """How a run's model writes conversations."""
    generation = _stored_generation(run, tokenizer)
    return ChatFormat(tokenizer, read_template(run.path), bos_id=generation.bos_id, eos_ids=generation.eos_ids)


def _stored_generation(run: RunDir, tokenizer: Tokenizer) -> Generation:
    """Those of an imported model; for a model trained here the tokenizer's end of text."""
    try:
        settings = read_json(run.path / FILE)
    except FileNotFoundError:
        end = tokenizer.end_of_text
        return Generation() if end is None else Generation(eos_ids=(end,), pad_id=end)
    except (OSError, ValueError) as error:
        raise ConfigError(f"{run.path / FILE}: cannot be read: {error}") from None
    return read_generation(settings, read_run_config(run.config).model.vocab_size)[0]


def requested_tokenizer(train: TrainConfig) -> str | None:
    """The tokenizer that a configuration sets for a directory without one; the default does not count as set."""
    return None if train.tokenizer == TrainConfig().tokenizer else train.tokenizer


def choose_tokenizer(model: ExternalModel, source: Path, requested: str | None) -> Tokenizer:
    if model.tokenizer is not None and requested is not None:
        raise InputError(f"{source} has its own tokenizer; --tokenizer is for a directory without one")
    if model.tokenizer is not None:
        return model.tokenizer
    if requested is None:
        raise InputError(f"{source} has no tokenizer.json; pass one: --tokenizer bytes, or the path of a tokenizer.json")
    if requested in TRAINED_TOKENIZERS:
        raise InputError(f"--tokenizer {requested} is trained on a text, and an import has none; expected bytes or a path")
    found = make_tokenizer(requested, "", model.config.vocab_size)
    if found.vocab_size > model.config.vocab_size:
        raise InputError(f"{requested} has {found.vocab_size} ids, but the model's vocabulary has {model.config.vocab_size}")
    return found
