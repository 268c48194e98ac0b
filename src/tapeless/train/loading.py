"""`tapeless.load`: the model of a run, of one of its checkpoints, or of a Hugging Face directory.

    tapeless.load("runs/tiny")                                  its newest weights
    tapeless.load("runs/tiny/checkpoints/step-00001000")        those of one step
    tapeless.load("runs/tiny", weights="ema")                   their moving average, where the run keeps one
    tapeless.load("Qwen3-0.6B")                                 safetensors and config.json, as transformers saves them
Tested by: tests/train/test_loading.py."""

import warnings
from pathlib import Path

from tapeless.errors import CheckpointError
from tapeless.interop.hf_import import is_hugging_face, read_model
from tapeless.model.build import AnyModel
from tapeless.model.transformer import Transformer
from tapeless.train import runs
from tapeless.train.checkpoint import MANIFEST, STEP_NAME, restore


def load(path: str | Path, *, weights: str = "raw") -> AnyModel:
    """Where the newest checkpoint of a run is damaged, the one before it is taken, with a warning."""
    run, which = Path(path), "latest"
    if is_hugging_face(run):
        external = read_model(run)
        model = Transformer(external.config, initialized=False)
        restore(model.params, external.params, run)
        return model
    if (run / MANIFEST).is_file():
        checkpoint = run.resolve()
        step = STEP_NAME.fullmatch(checkpoint.name)
        if not step:
            raise CheckpointError(f"{path} looks like a checkpoint, but is not named step-NUMBER; give it its name back")
        run, which = checkpoint.parents[1], str(int(step[1]))
    return runs.load(run, which=which, weights=weights, on_warning=lambda text: warnings.warn(text, stacklevel=4)).model
