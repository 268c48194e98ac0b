"""`tapeless.load`: the model of a run, of one of its checkpoints, or of a Hugging Face directory.

    tapeless.load("runs/tiny")                                  its newest weights
    tapeless.load("runs/tiny/checkpoints/step-00001000")        those of one step
    tapeless.load("runs/tiny", weights="ema")                   their moving average, if the run has one
    tapeless.load("runs/tiny", device="cuda", dtype="bfloat16") on a GPU
    tapeless.load("Qwen3-0.6B")                                 safetensors and config.json, as transformers saves them
    tapeless.load("runs/tiny").generate("The ")                 the text and its continuation
Tested by: tests/train/test_loading.py."""

import warnings
from pathlib import Path
from typing import Any

from tapeless.data.tokenizer import Tokenizer
from tapeless.errors import CheckpointError
from tapeless.interop.generation import Generation
from tapeless.interop.hf_import import is_hugging_face, read_model
from tapeless.model.build import AnyModel
from tapeless.training import runs
from tapeless.training.checkpoint import MANIFEST, STEP_NAME
from tapeless.training.imported import generation_of
from tapeless.training.run_dir import RunDir


def load(
    path: str | Path,
    *,
    weights: str = "raw",
    device: str | None = None,
    dtype: str | None = None,
    ops: str | None = None,
    threads: int | None = None,
) -> AnyModel:
    """The model with its tokenizer, on this machine: the settings that a run was trained with play no role.

    path: a run, one of its checkpoints, or a Hugging Face directory. weights: raw, or ema, their moving average. device:
    default a GPU if there is one, else the CPU. dtype: default float32, the dtype of the saved weights. ops: default auto.
    threads: the number of CPU threads while this model's methods run; default torch's own. No setting of the process changes.
    If the newest checkpoint of a run is damaged, the one before it is loaded, with a warning."""
    settings: dict[str, Any] = {"device": device, "dtype": dtype, "ops": ops, "threads": threads}
    run, which = Path(path), "latest"
    if is_hugging_face(run):
        found = read_model(run)
        model = runs.inference_model(found.config, found.params, run, **settings)
        if found.tokenizer is not None:
            attach_tokenizer(model, found.tokenizer, found.generation)
        return model
    if (run / MANIFEST).is_file():
        checkpoint = run.resolve()
        step = STEP_NAME.fullmatch(checkpoint.name)
        if not step:
            raise CheckpointError(f"{path} looks like a checkpoint, but is not named step-NUMBER; restore its name")
        run, which = checkpoint.parents[1], str(int(step[1]))
    warn = lambda text: warnings.warn(text, stacklevel=4)  # noqa: E731
    model, data, *_ = runs.load(run, which=which, weights=weights, **settings, on_warning=warn)
    attach_tokenizer(model, data.tokenizer, generation_of(RunDir(run), data.tokenizer))
    return model


def attach_tokenizer(model: AnyModel, tokenizer: Tokenizer, generation: Generation) -> None:
    """So that the model continues texts, ends and samples as `tapeless generate` does."""
    model.tokenizer, model.eos_ids, model.sampling = tokenizer, generation.eos_ids, generation.sampling
